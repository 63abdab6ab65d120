"""From the raw results under docs/explanation/performance/ to the page's tables and plots."""
