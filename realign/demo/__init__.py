"""Tasks of the examples and the documentation: tiny models and their data, such as two-digit additions and reviews."""
