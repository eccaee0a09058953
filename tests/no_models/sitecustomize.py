"""Put first on PYTHONPATH by the nbval test: in such a process building or loading a model fails."""

import importlib.abc
import importlib.machinery
import sys


class _Blocker(importlib.abc.MetaPathFinder):
    """Lets ``transformers.modeling_utils`` load, then makes every model refuse to be built."""

    def find_spec(self, name, path, target=None):
        if name != "transformers.modeling_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)

            def refuse(*_, **__):
                raise AssertionError("a notebook loaded a model while its stored outputs were checked")

            module.PreTrainedModel.__init__ = refuse
            module.PreTrainedModel.from_pretrained = refuse

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Blocker())
