"""`python -m realign.demo`: a tiny model learns addition by SFT and then by GRPO, on a laptop, in minutes."""
