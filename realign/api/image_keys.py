"""Keys of images in a `SequenceSample`.

A prompt has one sequence of patches and one of grids, with those of all its images in order. They belong to all
sequences of the prompt, so responses share them. A sequence contains the tokens of the first images of its prompt.

Shapes: P patches of all images, d values of a patch, I images.
"""

from __future__ import annotations

PIXELS = "pixel_values"
"""[P, d] fp32: patches of the images, from the image processor of the model."""
GRIDS = "image_grid_thw"
"""[I, 3] int64: number of patches of each image along time, height and width."""
IMAGE_KEYS = (PIXELS, GRIDS)
