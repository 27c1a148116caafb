"""Data sets that are tables: columns of numbers and categories."""
