"""Triton kernels without a GPU: computed by numpy in Triton's interpreter, or compiled ahead."""

import functools
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_interpret = functools.cache(interpreter.InterpretedFunction)


def interpret(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numpy compute the module's kernel of that name."""
    if triton.__version__.startswith("3.6."):
        pytest.skip("Triton 3.6's interpreter reads arrays of one element as numbers, which numpy 2.4 refuses")

    def call(self: Any, *arguments: Any, **options: Any) -> Any:  # tl.max and tl.sum are functions of Triton's, too
        patched = interpreter._patch_lang(self.fn)
        try:
            return _interpret(self.fn).rewrite()(*arguments, **options)
        finally:  # InterpretedFunction's own __call__ would leave Triton's language patched
            patched.restore()

    monkeypatch.setattr(JITFunction, "__call__", call)
    monkeypatch.setattr(module, name, _interpret(getattr(module, name).fn))


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, **options: Any) -> Any:
    """The kernel for a GPU of that compute capability, times ten, as PTX and as its code."""
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert f".target sm_{capability}" in made.asm["ptx"] and made.asm["cubin"]
    assert made.metadata.shared < 48 * 1024
    return made
