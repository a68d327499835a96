"""The faults of `make mutants` can still be planted, for tests that are still there."""

import ast

import pytest
from mutants.faults import FAULTS, PACKAGE, TESTS

pytestmark = pytest.mark.fast


def test_there_are_forty_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_code_that_is_there(fault):
    source = (PACKAGE / fault.file).read_text()
    planted = fault.planted(source)
    compile(planted, fault.file, "exec")
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
    for test in fault.tests:
        file, _, name = test.partition("::")
        function = name.partition("[")[0]
        assert not name or f"def {function}(" in (TESTS / file).read_text(), test
