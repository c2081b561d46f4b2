"""What stands around a rule: positions, queries and keys, rows, outputs. One table an axis, one row a value."""
