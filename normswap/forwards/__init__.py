"""The forwards of modules swapped for what they compute: one file per kind, each a guard and a call of an op."""
