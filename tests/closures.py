"""Pickle work that a test defines inside itself: a function that cannot be imported goes by value,
with what it closes over. Whoever unpickles it has the module around it already."""

import importlib
import io
import marshal
import pickle
import sys
import types


class Pickler(pickle.Pickler):
    def reducer_override(self, value):
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.CellType):
            # Filled when it is there: the content may be the function that closes over the cell
            return empty_cell, (), (value.cell_contents,), None, None, fill
        if isinstance(value, types.FunctionType) and not importable(value):
            code, defaults = marshal.dumps(value.__code__), value.__defaults__
            more = value.__kwdefaults__, value.__closure__
            return make_function, (code, value.__module__, defaults, *more)
        return NotImplemented


def importable(function):
    found = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def empty_cell():
    return types.CellType()


def fill(cell, content):
    [cell.cell_contents] = content


def make_function(code, module, defaults, keyword_defaults, closure):
    names = vars(importlib.import_module(module))
    function = types.FunctionType(marshal.loads(code), names, None, defaults, closure)
    function.__kwdefaults__ = keyword_defaults
    return function


def dumps(value):
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
