"""Optional parts: add those you want."""
