"""The axes around a rule: positions, queries and keys, rows, outputs. Each axis is a table, each
value a row."""
