"""What a run leaves on disk: checkpoints and saved models, metrics and samples, and recorded calls.

- `checkpoint`: folders that a run resumes from, saved models, and why a run failed.
- `metrics`: live display, files, trackers, curves and samples.
- `recorded_calls`: the samples of each step, which the time machine reads.
"""

from realign.records.metrics.trackers import MLflow, SwanLab, TensorBoard, Tracker, TrackerSpec, Trackio, WandB

__all__ = ["MLflow", "SwanLab", "TensorBoard", "Tracker", "TrackerSpec", "Trackio", "WandB"]
