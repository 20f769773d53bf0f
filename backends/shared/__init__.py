"""What several backends are made of: a supervisor's event loop and children, its messages, its run folder."""
