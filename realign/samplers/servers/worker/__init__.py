"""The module that servers of vLLM import. This folder is on their `PYTHONPATH`, so nothing else may lie here."""
