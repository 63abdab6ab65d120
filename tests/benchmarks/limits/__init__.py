"""What a loop written by hand for just one purpose does with the same writes: the limit."""
