"""Compares the losses of TRL, verl, OpenRLHF, AReaL, SkyRL and slime with those of realign."""
