"""Getting work in: enqueue, the save hook, and the relay that hands committed jobs over."""
