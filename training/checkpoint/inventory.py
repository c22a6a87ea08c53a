"""List the tensors in a file of torch.save without executing anything in it.

Such a file is a zip archive of one pickle and one record a storage. The pickle is read by an unpickler that knows
dictionaries, lists and tensors and replaces every other class by an empty placeholder, so that no code of the file runs
and no tensor is loaded.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from training.checkpoint.manifest import Damaged, Tensors

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
}
# The functions by which torch pickles a tensor; the reader replaces them.
_REBUILD = (
    "_rebuild_tensor_v2",
    "_rebuild_tensor_v3",
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
    "_rebuild_from_type_v2",
)


@dataclass(frozen=True)
class _Storage:
    dtype: str


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: list[int]


def tensors_of(value: Any) -> Tensors:
    """Every tensor inside nested dictionaries, lists and tuples; its name is the keys on the way to it, joined by `/`.

    Tensors inside other objects are not seen.
    """
    return {name: (str(leaf.dtype).removeprefix("torch."), list(leaf.shape)) for name, leaf in leaves(value)}


def tensors_in(path: Path, open_file: Callable[[Path], BinaryIO] = lambda path: path.open("rb")) -> Tensors:
    """`tensors_of` a file on disk. Raises Damaged when it is no file of torch.save, or a storage has the wrong size.

    open_file: opens it for reading, and decrypts where needed.
    """
    try:
        with open_file(path) as whole, zipfile.ZipFile(whole) as archive:
            inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            with archive.open(inner) as file:
                reader = _Reader(file, sizes, inner.removesuffix("data.pkl") + "data/")
                return tensors_of(reader.load())
    except Damaged as damage:
        raise Damaged(f"{path.name}: {damage}") from None
    except (
        zipfile.BadZipFile,
        StopIteration,
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
    ) as why:
        raise Damaged(f"{path.name} is not a file of torch.save: {why or type(why).__name__}") from None


def item_bytes(dtype: str) -> int:
    """Bytes of one element; 1 for the narrow dtypes that have no storage class of their own."""
    return _ITEM_BYTES.get(dtype, 1)


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, sizes: dict[str, int], prefix: str) -> None:
        super().__init__(file)
        self._sizes, self._prefix = sizes, prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module.startswith("torch"):
            if name in _STORAGES:
                return _Storage(_STORAGES[name])
            if name in _REBUILD:
                return getattr(self, name)
        return type(name, (_Placeholder,), {})

    def persistent_load(self, pid: Any) -> _Storage:
        _, storage, key, _, elements = pid
        if not isinstance(storage, _Storage):  # untyped: counted in bytes
            storage = _Storage("uint8")
        expected, found = elements * item_bytes(storage.dtype), self._sizes.get(f"{self._prefix}{key}")
        if found != expected:
            raise Damaged(f"storage {key} has {found} bytes where its tensors need {expected}")
        return storage

    @staticmethod
    def _rebuild_tensor_v2(storage: _Storage, offset: int, shape: Any, *further: Any) -> _Tensor:
        return _Tensor(storage.dtype, list(shape))

    @staticmethod
    def _rebuild_tensor_v3(
        storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *further: Any
    ) -> _Tensor:
        return _Tensor(getattr(dtype, "__name__", storage.dtype), list(shape))

    @staticmethod
    def _rebuild_parameter(tensor: _Tensor, *further: Any) -> _Tensor:
        return tensor

    _rebuild_parameter_with_state = _rebuild_parameter

    @staticmethod
    def _rebuild_from_type_v2(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
        return rebuild(*arguments)


class _Placeholder:
    """Replaces an object of any other class, and is empty."""

    def __new__(cls, *arguments: Any, **named: Any) -> _Placeholder:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor inside nested dictionaries, lists and tuples, with its name."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    elif isinstance(value, _Tensor) or hasattr(value, "data_ptr"):
        yield "/".join(path), value
