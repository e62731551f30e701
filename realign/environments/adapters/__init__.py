"""Environments of other packages as environments or agents of realign. Each package is imported when it is used."""
