"""The local stack: one supervisor, every role as a process of its own."""
