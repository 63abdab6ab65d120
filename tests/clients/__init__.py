"""A service that programs in other languages talk to, and the tests of those in docs/clients."""
