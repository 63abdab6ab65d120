"""What the tests notice: mutants of the package, drawn by a seed, and the tests that kill them.

    python -m tests.mutants run --seed 1 --count 60     # some hours
    python -m tests.mutants show 17 --seed 1            # one mutant as a diff

A mutant is the package, as it is committed, with one small change: a condition negated, a bound
off by one, a call left out, a condition of a statement cut. The tests of its module are run first,
then the default tier, until one fails. What no test kills is a promise without a test, a line that
is not needed, or equivalent to the original. The kinds of change are those of mutmut and
cosmic-ray, and their conditions in SQL.
"""
