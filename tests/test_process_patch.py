"""A patch of the process acts on the threads that opened it, and is gone when the last context closes."""

import threading
import types

import pytest

from keras_paragrad.compat.process_patch import ProcessPatch, Replacement

pytestmark = pytest.mark.fast


def patched_module():
    """A module with two functions, and a patch of them."""

    def add(number, *, to=0):
        return number + to

    module = types.SimpleNamespace(add=add, double=lambda number: 2 * number)

    def shifted(value, original, *arguments, **keywords):
        return original(*arguments, **keywords) + value

    return module, ProcessPatch(lambda: [Replacement(module, name, shifted) for name in ("add", "double")])


def results(module):
    return module.add(1, to=2), module.double(1)


def test_acts_while_a_context_is_open_and_nests():
    module, patch = patched_module()
    before = dict(vars(module))
    with patch.open(10):
        assert results(module) == (13, 12)
        assert module.add.__name__ == "add"
        with patch.open(20):
            assert results(module) == (23, 22)
            with patch.open(None):
                assert results(module) == (3, 2)
            assert patch.value == 20
        assert results(module) == (13, 12)
    assert patch.value is None
    assert vars(module) == before


def test_an_error_within_it_closes_it():
    module, patch = patched_module()
    before = dict(vars(module))
    with pytest.raises(KeyError), patch.open(10), patch.open(20):
        raise KeyError
    assert patch.value is None
    assert vars(module) == before


def test_an_attribute_that_is_missing_leaves_the_others():
    module, _ = patched_module()
    before = dict(vars(module))
    patch = ProcessPatch(lambda: [Replacement(module, name, print) for name in ("add", "gone")])
    for _ in range(2):
        with pytest.raises(AttributeError, match="gone"), patch.open(10):
            raise AssertionError
        assert patch.value is None
    assert vars(module) == before


def test_methods_of_classes_own_and_inherited():
    class Base:
        def name(self):
            return "base"

    class Other(Base):
        def name(self):
            return f"other of {super().name()}"

    class Heir(Base):
        pass

    def counting(calls, original, owner):
        calls.append(type(owner).__name__)
        return original(owner)

    patch = ProcessPatch(lambda: [Replacement(each, "name", counting) for each in (Base, Other, Heir)])
    calls, before = [], [dict(vars(each)) for each in (Base, Other, Heir)]
    with patch.open(calls):
        assert (Other().name(), Heir().name()) == ("other of base", "base")
    assert calls == ["Other", "Other", "Heir"]
    assert [dict(vars(each)) for each in (Base, Other, Heir)] == before


def test_contexts_of_other_threads_act_there_alone_and_close_in_any_order():
    module, patch = patched_module()
    before, seen = dict(vars(module)), []
    opened, may_close = threading.Event(), threading.Event()

    def other():
        with patch.open(10):
            opened.set()
            may_close.wait(5)
            seen.append(results(module))

    thread = threading.Thread(target=other)
    with patch.open(20):
        thread.start()
        opened.wait(5)
        assert results(module) == (23, 22)
    assert results(module) == (3, 2)
    assert vars(module) != before
    may_close.set()
    thread.join()
    assert seen == [(13, 12)]
    assert vars(module) == before


def test_many_threads_at_once():
    module, patch = patched_module()
    before, wrong = dict(vars(module)), []
    start = threading.Barrier(8)

    def work(index):
        start.wait(5)
        for _ in range(300):
            # Replacements may end between a look-up of the function and its call.
            with patch.open(index):
                inside = results(module)
            if inside != (3 + index, 2 + index) or results(module) != (3, 2):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert vars(module) == before
