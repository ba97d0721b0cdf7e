"""Where a task's rows come from, a file for each kind of source."""
