"""A command's options, built from the type that holds what they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from unskew.runtime.options import Parameter, asked_for


def asks_for(options: type[msgspec.Struct], **instead: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each field of `options` that says how it is asked for.

    The command gets the fields' values as a dictionary, and then its own parameters; a field that was left out of the command
    line and has no default of its own there is not in it. `instead`: the command's own parameters that ask for a field.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(options)}
    fields = {name: _option(name, kind, how, defaults[name]) for name, (kind, how) in asked_for(options).items()}

    def build(command: Callable[..., None]) -> Callable[..., None]:
        _, *rest = inspect.signature(command).parameters.values()
        hints = get_type_hints(command, include_extras=True)
        own = {one.name: one.replace(annotation=hints[one.name], kind=one.KEYWORD_ONLY) for one in rest}
        order = [name for field in defaults for name in instead.get(field, (field,)) if name in fields or name in own]

        def called(**given: Any) -> None:
            asked = {name: given.pop(name) for name in fields}
            command({name: value for name, value in asked.items() if value is not None}, **given)

        every = own | fields
        signature = inspect.Signature([every[name] for name in dict.fromkeys([*order, *own])])
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return build


def _option(name: str, kind: Any, how: Parameter, default: Any) -> inspect.Parameter:
    flags = (f"--{name.replace('_', '-')}",) if kind is bool else ()
    option = typer.Option(
        *flags, help=how.help, rich_help_panel=how.panel, metavar=how.metavar, show_default=how.default or True
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if how.default else default,
        annotation=Annotated[kind | None if how.default else kind, option],
    )
