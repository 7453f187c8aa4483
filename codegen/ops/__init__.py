"""The contracts: one file per op family, one table per op."""
