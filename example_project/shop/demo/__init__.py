"""The `demo` command: reads a file of orders, waits for their jobs, tells what became of them."""
