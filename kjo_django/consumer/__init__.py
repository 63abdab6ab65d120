"""Getting work done: poll, lanes, groups, attempts, settlement."""
