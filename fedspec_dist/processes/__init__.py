"""How the processes of a run find each other, watch each other, and end. May import `core` and `distributed`."""
