from memcalib_jax.training.bin_sizes import BinSizes, SizeTable, UsedSizes

ALL = (36, 40, 44, 48, 52, 56, 60, 64)


def test_sizes_are_free_for_three_steps_and_then_those_used():
    table = SizeTable(64)
    for step, (scoring, training) in enumerate([({36}, {40}), ({48}, {40}), ({36}, {64})], 1):
        assert table.allowed(step) == BinSizes(ALL, ALL)
        table.note(UsedSizes(scoring, training))
    assert table.allowed(4) == BinSizes((36, 48), (40, 64))


def test_a_pass_that_never_ran_keeps_all_sizes():
    table = SizeTable(64)
    table.note(UsedSizes(training={40}))
    assert table.allowed(4) == BinSizes(ALL, (40,))


def test_a_resumed_run_has_the_same_sizes():
    table, resumed = SizeTable(64), SizeTable(64)
    table.note(UsedSizes({48, 36}, {40}))
    assert table.get_state() == {"scoring": [36, 48], "training": [40]}
    resumed.set_state(table.get_state())
    for step in (1, 3, 4, 9):
        assert resumed.allowed(step) == table.allowed(step)
