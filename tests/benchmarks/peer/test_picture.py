from __future__ import annotations

import json
import struct

from benchmarks.peer import picture


def test_every_scenario_of_every_report_is_drawn(tmp_path, monkeypatch):
    seconds = {"trl": {"wall": 6.0, "rollout": 4.0, "training": 2.0}}
    seconds["realign"] = {"wall": 1.2, "rollout": 0.7, "training": 0.5}
    files = []
    for name in ("long_tail", "ppo_long_tail"):
        files.append(tmp_path / f"{name}.txt")
        row = {"scenario": name, "seconds": seconds, "ratio": {"wall": 5.0}}
        files[-1].write_text("a table\n" + json.dumps({"scenarios": [row]}) + "\n")
    drawn = []
    draw = picture.draw
    monkeypatch.setattr(picture, "draw", lambda rows, out: (drawn.extend(rows), draw(rows, out)))
    picture.main([*map(str, files), "--out", str(tmp_path / "x.png")])
    assert [row["scenario"] for row in drawn] == ["long_tail", "ppo_long_tail"]
    data = (tmp_path / "x.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG")
    assert width > height > 400
