"""The proof: every swapped site against its original in float64, the whole model against the original."""
