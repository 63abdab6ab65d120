"""Projects that tests copy and work on; none of their own tests is collected here."""
