"""Compares the losses of TRL, verl, OpenRLHF, AReaL and SkyRL with those of realign."""
