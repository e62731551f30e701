"""Fast decode steps: fused layers, and a C++ library that computes a whole step. `fusion.Fusion` is the way in."""
