"""House rules: layers, documents that keep pace with the code, nothing that runs data."""

from __future__ import annotations

import ast
import re
import shlex
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest

import dcptool
from dcptool.cli import app, run_command, sections
from dcptool.pipeline import recipe

try:
    import tomllib
except ImportError:
    import tomli as tomllib

PACKAGE = Path(dcptool.__file__).parent
CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text()
PAGES = [README, *(path.read_text() for path in sorted((CHECKOUT / "docs").glob("*.md")))]
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Imports point down only: each may import what stands in its row, and itself.
GROUND = ("child", "errors", "console", "files", "torchfile", "weights")
LAYERS = {
    "network": (),
    "training": ("network",),
    "selection": ("training", "network"),
    "deploy": ("training", "network"),
    "report": ("selection", "deploy", "training", "network"),
    "pipeline": ("report", "selection", "deploy", "training", "network"),
    "cli": ("pipeline", "report", "selection", "deploy", "training", "network"),
}
ONLY_IN = {
    "click": ("cli/",),
    "rich": ("console.py", "cli/"),
    "onnx": ("deploy/",),
    "onnxruntime": ("deploy/",),
    "onnxscript": ("deploy/",),
    "fvcore": ("network/cost.py",),
    "timm": ("network/", "training/"),
    "matplotlib": ("report/",),
    "jinja2": ("report/",),
}

# They look at the opcodes of a pickle in order to refuse it, and run none.
WALK_PICKLES = ("torchfile.py", "weights.py")
RUN_DATA = (
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "torch.jit.load",
    "torch.export.load",
    "torch.hub.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "runpy.run_path",
    "importlib.util.spec_from_file_location",
)
# One module turns files of weights into tensors.
LOADS_WEIGHTS = "weights.py"


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            module = str(node.module)
            yield module
            if module == "dcptool":
                yield from (f"dcptool.{alias.name}" for alias in node.names)


def test_imports_point_down():
    wrong = []
    for path in SOURCES:
        room = name_of(path).split("/")[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue  # the doors: they lead everywhere
        below = GROUND[: GROUND.index(room)] if room in GROUND else (*GROUND, *LAYERS[room], room)
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "dcptool" or len(parts) == 1 or parts[1] == "__version__":
                continue
            if parts[1] not in below:
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


def test_libraries_stay_in_their_rooms():
    wrong = []
    for path in SOURCES:
        for module in imports(path):
            rooms = ONLY_IN.get(module.split(".")[0])
            if rooms and not name_of(path).startswith(rooms):
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


def test_nothing_runs_data():
    wrong = []
    for path in SOURCES:
        refused = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
        if name_of(path) in WALK_PICKLES:
            refused.remove("pickle")
        wrong += [f"{name_of(path)} imports {m}" for m in imports(path) if m in refused]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            what = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if what in RUN_DATA:
                wrong.append(f"{name_of(path)}:{node.lineno} calls {what}")
            if keywords.get("shell") not in (None, "False"):
                wrong.append(f"{name_of(path)}:{node.lineno} starts a shell")
            loads = what in ("torch.load", "torch.hub.load_state_dict_from_url")
            if loads and keywords.get("weights_only") != "True":
                wrong.append(f"{name_of(path)}:{node.lineno} unpickles")
            if loads and name_of(path) != LOADS_WEIGHTS:
                wrong.append(f"{name_of(path)}:{node.lineno} loads weights")
    assert wrong == []


def test_files_can_be_read_to_their_end():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lines.items() if n > 450} == {}
    vague = {"utils", "util", "helpers", "common", "manager", "misc"}
    assert [name for name in lines if Path(name).stem in vague] == []


def test_nothing_is_left_for_later():
    texts = [*SOURCES, CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md"]
    marks = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")
    assert [path.name for path in texts if marks.search(path.read_text())] == []


def test_every_command_has_its_file():
    files = {p.name.removesuffix("_command.py") for p in (PACKAGE / "cli").glob("*_command.py")}
    assert files == set(app.COMMANDS)


def commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(app.group, info_name="dcptool")
    yield "", app.group
    for name in app.COMMANDS:
        command = app.group.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", one) for below, one in command.commands.items())


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_commands_and_options_have_help(name, command):
    assert command.help
    missing = [
        param.opts[0]
        for param in command.params
        if isinstance(param, click.Option) and not param.help
    ]
    assert missing == []


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_readme_names_every_command_and_option(name, command):
    if name:
        assert f"`dcptool {name}" in README or f"\ndcptool {name}" in README
    missing = []
    for param in command.params:
        if not isinstance(param, click.Option):
            continue
        for option in (*param.opts, *param.secondary_opts):
            if option.startswith("--") and not re.search(rf"{option}(?![\w-])", README):
                missing.append(option)
    assert missing == []


def readme_lines() -> list[str]:
    """Every `dcptool ...` command in a code block of the README and of docs."""
    found = []
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", "\n".join(PAGES), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.removeprefix("$ ").strip()
            for part in re.split(r"&&|\|\||[|;<>]|\$\(|\)", text):
                words = part.strip().split()
                words = words[1:] if words[:1] in (["if"], ["!"], ["then"]) else words
                if words[:1] == ["torchrun"]:
                    words = words[words.index("-m") + 1 :]
                if words[:1] == ["dcptool"]:
                    found.append(" ".join(words))
    return found


def test_readme_has_commands():
    assert len(readme_lines()) >= 5


def test_links_between_pages_lead_somewhere():
    """Each file is there, and each place in it has its heading."""
    dead = []
    for page in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, place = link.partition("#")
            target = page.parent / name if name else page
            is_there = target.exists() and (not place or place in places(target))
            if "://" not in link and not is_there:
                dead.append(f"{page.name}: {link}")
    assert dead == []


def places(page: Path) -> set[str]:
    """What links can name in a page: its headings, as they are turned into anchors."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("line", readme_lines())
def test_readme_lines_parse(line):
    words = shlex.split(line, comments=True)[1:]
    with click.Context(app.group, info_name="dcptool") as context, suppress(click.exceptions.Exit):
        if words[0].startswith("-"):
            app.group.make_context("dcptool", words)
            return
        name, command, rest = app.group.resolve_command(context, words)
        while isinstance(command, click.Group):
            name, command, rest = command.resolve_command(context, rest)
        assert command is not None
        params = command.make_context(name, rest, parent=context).params
    if name == "run":
        # mine.toml is the copy that the line before makes.
        known = params["recipe"].replace("mine.toml", "quickstart")
        run_command.check(recipe.read(known, sections.schema(), params["changes"]))


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_readme_shows_a_recipe_that_is_right():
    (text,) = readme_blocks("toml")
    schema = sections.schema()
    run_command.check(recipe.check("x", text, recipe.parse(text, "x"), schema, where="README"))


def test_readme_shows_python_that_exists():
    called = []
    for block in readme_blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dcptool."):
                name = ast.unparse(node.func).removeprefix("dcptool.")
                assert name in dcptool.__all__
                called.append(name)
                if name in ("prune", "export", "bench"):
                    given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
                    sections.words(name, given)
    assert set(called) >= {"load", "prune", "run"}


def test_changelog_is_of_this_version():
    versions = re.findall(r"^## \[([^\]]+)\]", (CHECKOUT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == dcptool.__version__


def test_public_names():
    public = {
        name
        for name, value in vars(dcptool).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations", "Any", "TYPE_CHECKING"} == set(dcptool.__all__)
    assert dcptool.__all__ == [
        "analyze",
        "bench",
        "evaluate",
        "export",
        "finetune",
        "load",
        "prune",
        "run",
    ]


def test_recipes_are_toml_with_a_purpose():
    folder = CHECKOUT / "recipes"
    assert (folder / "README.md").is_file()
    for path in folder.glob("*.toml"):
        text = path.read_text()
        assert text.startswith("# "), f"{path.name} does not say what it is for"
        tomllib.loads(text)


def test_recipes_are_inside_the_wheel():
    if PACKAGE.parent.name != "site-packages":
        pytest.skip("not installed from a wheel")
    inside = {path.name for path in (PACKAGE / "recipes").iterdir()}
    assert inside == {path.name for path in (CHECKOUT / "recipes").iterdir()}
