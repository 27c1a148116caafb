"""Who is told of every round."""
