"""Two import stand-ins that let sglang 0.5.x start on a CPU; on ``PYTHONPATH`` of the test server's process only.

``torchvision`` is imported by vision configs that text never touches, and its released builds do not load beside torch
for CPUs. ``sgl_kernel`` exists for CUDA alone; CPU mode imports one function of it and does not call it. Whatever of
them is called raises NotImplementedError. Only importers inside sglang see them: torch and transformers, which ask
whether the real packages are installed, must keep hearing no.
"""

import importlib.abc
import importlib.machinery
import sys
import types

STAND_INS = {"torchvision", "sgl_kernel"}


class _Anything:
    """An object with every attribute; calling it fails."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args, **kwargs):
        raise NotImplementedError("a stand-in was called: the CPU test server cannot do this")


class _Class(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Class(name, (), {}) if name[:1].isupper() else _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in STAND_INS:
            return None
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "") if frame is not None else ""
        if importer.split(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
