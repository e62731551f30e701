"""Go back to a step of a run: recompute it (`realign replay`), branch off (`fork`), find where runs part (`bisect`)."""
