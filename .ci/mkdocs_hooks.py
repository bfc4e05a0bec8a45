"""What MkDocs does for this repository besides docs/: pages of other folders, and the reference.

Pages link to each other as files of the repository. The site has no `docs/` in its addresses, so
links are written anew for it.
"""

import contextlib
import functools
import importlib
import inspect
import io
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

from distributary.tools.cli import parser

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_INDEX = "api/index.md"  # the list of public names, in the order of the reference
_COMMANDS = "api/commands.md"
_MODULE = re.compile(r"^## `distributary\.([\w.]+)`$", flags=re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?P<path>[\w./-]+)(?=[#)])")


def on_config(config):
    """Adds the pages of the reference behind the list of public names."""
    (section,) = (s for part in config.nav for s in part.values() if _INDEX in s)
    section += [_COMMANDS, *(f"api/{module}.md" for module in _reference())]
    return config


def on_files(files, config):
    for path in _linked_files():
        if not path.is_relative_to(_DOCS):
            name = path.relative_to(_ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, _COMMANDS, content=_commands()))
    for module, names in _reference().items():
        blocks = "\n\n".join(f"::: {module}.{name}" for name in names)
        content = f"# {module}\n\n{blocks}\n"
        files.append(File.generated(config, f"api/{module}.md", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    source = page.file.abs_src_path
    if source is None:  # a page of the reference
        return markdown
    markdown = _LINK.sub(lambda link: _address(link["path"], Path(source), page.file), markdown)
    return _with_references(markdown) if page.file.src_uri == _INDEX else markdown


def _linked_files():
    """The pages in docs/, and all files of the repository that they lead to."""
    files = sorted(_DOCS.rglob("*.md"))
    for file in files:  # grows
        if file.suffix == ".md":
            links = _LINK.finditer(file.read_text(encoding="utf-8"))
            targets = ((file.parent / link["path"]).resolve() for link in links)
            files += {path: None for path in targets if path.is_file() and path not in files}
    return files


def _address(path, source, page_file):
    """Where a file of the repository is in the site, relative to the page that links to it."""
    target = (source.parent / path).resolve()
    if not target.is_file():
        return path
    base = _DOCS if target.is_relative_to(_DOCS) else _ROOT
    name = target.relative_to(base).as_posix()
    return posixpath.relpath(name, posixpath.dirname(page_file.src_uri))


@functools.cache
def _reference():
    """Public modules with those of their names that no earlier one has, as docs/api/ lists them."""
    index = (_DOCS / _INDEX).read_text(encoding="utf-8")
    modules = ["distributary", *(f"distributary.{name}" for name in _MODULE.findall(index))]
    reference, seen = {}, set()
    for module in modules:  # grows
        exported = importlib.import_module(module)
        names = []
        for name in getattr(exported, "__all__", ()):
            value = getattr(exported, name)
            if inspect.ismodule(value):
                modules += [value.__name__] if value.__name__ not in modules else []
            elif re.search(rf"[`.]{name}`", index) and _identity(value, module, name) not in seen:
                seen.add(_identity(value, module, name))
                names.append(name)
        if names:
            reference[module] = names
    return reference


def _commands():
    """A page with the help of every command."""
    sections = ["# Commands\n\n`python -m distributary` is the same as `distributary`."]
    for name in re.findall(r"^    (\w+)  ", parser().format_help(), flags=re.MULTILINE):
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parser().parse_args([name, "--help"])
        sections.append(f"## distributary {name}\n\n```text\n{text.getvalue()}```")
    return "\n\n".join(sections)


def _with_references(markdown):
    """The list of public names with a link from each name to its entry."""
    entries = {
        _identity(_value(module, name), module, name): f"{module}.{name}"
        for module, names in _reference().items()
        for name in names
    }
    module, lines = "distributary", []
    for line in markdown.splitlines():
        heading = _MODULE.match(line)
        module = f"distributary.{heading[1]}" if heading else module
        names = re.match(r"- `[\w.]+`(, `[\w.]+`)*", line)
        if names:
            link = functools.partial(_link, module, entries)
            line = re.sub(r"`([\w.]+)`", link, names[0]) + line[names.end() :]
        lines.append(line)
    return "\n".join(lines)


def _link(module, entries, match):
    value = _value(module, match[1])
    if inspect.ismodule(value):
        page = value.__name__
        return f"[{match[0]}]({page}.md)" if page in _reference() else match[0]
    return f"[{match[0]}][{entries[_identity(value, module, match[1])]}]"


def _identity(value, module, name):
    """The same for one class or function under several public names."""
    return getattr(value, "__module__", module), getattr(value, "__qualname__", name)


def _value(module, name):
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
