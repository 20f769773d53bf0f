"""What the suite looks at, a module for each kind of question."""
