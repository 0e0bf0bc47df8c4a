"""Tests of mm, in the order of mm.py's sections: `python -m pytest test_mm.py`, or `make test`.

What depends on bytes and time talks to Server, a scripted server on loopback; what depends on a terminal runs in Terminal,
a pseudo-terminal; plain requests are answered by the `responses` library. Nothing here needs a model or a network.
"""
import argparse
import collections
import contextlib
import glob
import gzip
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import py_compile
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from types import SimpleNamespace

import pytest
import requests
import responses

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import mm  # noqa: E402

PATIENCE = 10  # seconds until a test that waits for something gives up


# ======================================================================================================================
# Helpers: what a server says
# ======================================================================================================================

def sse(*values):
    """Server-sent events, one for each value: bytes as they are, anything else as JSON."""
    return b"".join(b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + b"\n\n" for v in values)


def chunk(content=None, reasoning=None, finish=None, **delta):
    """The event of one chat.completion.chunk."""
    delta.update({key: text for key, text in (("content", content), ("reasoning_content", reasoning)) if text is not None})
    return sse({"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def call(**fields):
    """The event of one fragment of a tool call: index, id, name, arguments, where they are given."""
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return chunk(tool_calls=[{**fields, "function": function}])


def usage(**figures):
    return sse({"choices": [], "usage": figures})


STOP, CUT, DONE = chunk(finish="stop"), chunk(finish="length"), sse(b"[DONE]")
OK, HALF, LOST = chunk("ok") + STOP + DONE, chunk("half"), sse({"error": {"message": "slot lost"}})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def stream(*steps):
    """The script of a body that ends when the connection does."""
    return [HEAD + b"Connection: close\r\n\r\n", *steps]


def chunked(*steps):
    """The same, each piece in an HTTP chunk of its own, and ended properly."""
    frames = [b"%x\r\n%s\r\n" % (len(step), step) if isinstance(step, bytes) else step for step in steps]
    return [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *frames, b"0\r\n\r\n"]


def reply(status, body=b"", **headers):
    """A whole response; a dict or list goes out as JSON, Retry_After=1 as a header."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return [("\r\n".join(lines) + "\r\n\r\n").encode() + body]


class Server:
    """A model server that plays a script for each POST, the last one again and again.

    A script is a list of steps: bytes to send, seconds to pause, an Event to wait for, a function to call, (bytes, seconds) to repeat until the
    client leaves, "hang" (the same, silent), "reset". `posts` and `gets` are the requests in the order of their arrival.
    """

    def __init__(self, *scripts, models=("m",), host="127.0.0.1"):
        self.scripts, self.posts, self.gets, self.left, self.news = scripts, [], [], 0, threading.Condition()
        self.render = None  # what /apply-template makes of a request's messages
        self.models = {"object": "list", "data": [{"id": name} for name in models]}
        self.listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port = self.listener.getsockname()[1]
        self.root = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self.url = self.root + "/v1"
        threading.Thread(target=self.accept, name="server", daemon=True).start()

    def accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(sock,), name="server", daemon=True).start()

    def answer(self, sock):
        with sock:
            try:
                script = self.take(sock)
                for step in script:
                    self.play(step, sock)
            except OSError:  # the client went away
                with self.news:
                    self.left += 1
                    self.news.notify_all()

    def take(self, sock):
        """Reads a request, and tells it; -> the script that answers it."""
        with sock.makefile("rb") as file:
            if not file.peek(1)[:1].isalpha():  # nothing, or the greeting of TLS
                return reply(400)
            words = file.readline().decode().split()
            lines = iter(lambda: file.readline().decode("latin-1").strip(), "")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            raw = file.read(int(headers.get("content-length", 0)))
        request = SimpleNamespace(method=words[0], path=words[1], headers=headers, body=json.loads(raw or "null"))
        with self.news:
            seen = self.gets if words[0] == "GET" or words[1] == "/apply-template" else self.posts
            seen.append(request)
            place = len(seen) - 1
            self.news.notify_all()
        if words[1] == "/apply-template":
            return reply(200, {"prompt": self.render(request.body["messages"])}) if self.render else reply(404, {"error": "no such page"})
        if words[0] == "POST":
            return self.script(request, place)
        return reply(200, self.models) if words[1].endswith("/models") else reply(404, {"error": "no such page"})

    def script(self, request, place):
        return self.scripts[min(place, len(self.scripts) - 1)]

    def play(self, step, sock):
        if isinstance(step, bytes):
            sock.sendall(step)
        elif callable(step):
            step()
        elif isinstance(step, float):
            time.sleep(step)
        elif step == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            ticking, pace = step if isinstance(step, tuple) else (b"", 0.01)
            while not (isinstance(step, threading.Event) and step.is_set()):
                if select.select([sock], [], [], pace)[0] and not sock.recv(1):
                    raise OSError("the client went away")
                sock.sendall(ticking)

    def wait(self, condition):
        with self.news:
            assert self.news.wait_for(condition, PATIENCE), "the server waited in vain"

    def arrived(self, number=1):
        """The POST of that number, once it is there."""
        self.wait(lambda: len(self.posts) >= number)
        return self.posts[number - 1]

    def gone(self, number=1):
        """Waits until so many clients have gone away in the middle of a script."""
        self.wait(lambda: self.left >= number)

    def roles(self, number):
        return [message["role"] for message in self.arrived(number).body["messages"]]

    def close(self):
        try:
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError:
            pass  # not on macOS, not twice
        self.listener.close()


@pytest.fixture
def serve():
    servers = []
    yield lambda *scripts, **options: servers.append(Server(*scripts, **options)) or servers[-1]
    for server in servers:
        server.close()


# ======================================================================================================================
# Helpers: mm as a process, in a terminal, and in this process
# ======================================================================================================================

def document(name):
    return pathlib.Path(HERE, name).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The path of README.md's launcher, for a copy of mm.py beside it that is compiled once: half of the time of many tests.

    (A copy, so that a config.yaml that lies beside the real one is not read.)
    """
    folder = tmp_path_factory.mktemp("program")
    py_compile.compile(shutil.copy(os.path.join(HERE, "mm.py"), str(folder)))
    launcher = document("README.md").split("<<'END'")[1].split("\nEND\n")[0].split("\n", 1)[1]
    (folder / "mm").write_text(launcher.replace("~/.local/lib/mm", str(folder)))
    return str(folder / "mm")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if re.search(r"(?i)_proxy$|^(MM|XDG|LC)_|_API_KEY$|NETRC|NO_COLOR|PYTHON(UTF8|IOENCODING)|CA_BUNDLE$", name):
            monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), "LANG": "C.UTF-8", "TERM": "xterm", "PYTHONDONTWRITEBYTECODE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True, scope="session")
def no_signal_is_ignored():
    """As it is where tests run in the background, or under nohup: mm would ignore it too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def no_test_hangs():
    def give_up(*_):
        raise AssertionError("the test hangs")
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(3 * PATIENCE)
    yield
    signal.alarm(0)


@pytest.fixture
def start_mm(program, tmp_path):
    """Starts mm with its output in pipes. redirect: what a shell shall do to its streams; prelude: what it shall do before."""
    started = []

    def start(*args, stdin=None, env=None, redirect="", prelude="", program=program):
        started.append(subprocess.Popen(
            ["sh", "-c", f'{prelude} exec "$@" {redirect}', "sh", sys.executable, program, *args], env={**os.environ, **(env or {})},
            cwd=tmp_path, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE))
        return started[-1]
    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run_mm(start_mm):
    """Runs mm to its end; -> code, out (text), raw (its bytes), err, events (of --json)."""
    def run(*args, stdin=None, **how):
        process = start_mm(*args, stdin=stdin, **how)
        raw, err = process.communicate(stdin.encode() if isinstance(stdin, str) else stdin, timeout=PATIENCE)
        out, err = raw.decode("utf-8", "replace"), err.decode("utf-8", "replace")
        assert "Traceback" not in err and "Exception ignored" not in err, err
        events = [json.loads(line) for line in out.splitlines()] if "--json" in args else []
        return SimpleNamespace(code=process.returncode, out=out, raw=raw, err=err, events=events)
    return run


class Terminal:
    """mm in a terminal of its own; `shown` is all that it wrote there."""

    def __init__(self, command, env, cwd, redirect, prelude):
        self.master, self.slave = os.openpty()
        self.attributes = termios.tcgetattr(self.slave)
        self.shown, self.read = "", 0
        env = {**os.environ, **env, "TTY": os.ttyname(self.slave)}
        self.process = subprocess.Popen(["sh", "-c", f'{prelude} exec "$@" {redirect}', "sh", *command], env=env, cwd=cwd, start_new_session=True)

    def take(self, seconds=0.05):
        """Takes in what was written, waiting for it no longer than that; -> whether there was anything."""
        there = select.select([self.master], [], [], seconds)[0]
        self.shown += os.read(self.master, 1 << 16).decode("utf-8", "replace") if there else ""
        return there

    def expect(self, text):
        """What was written up to `text`, which is waited for, since the last call."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.shown[self.read:]:
            assert time.monotonic() < deadline, f"{text!r} did not appear after {self.shown[self.read:]!r}"
            self.take()
        start, self.read = self.read, self.shown.index(text, self.read) + len(text)
        return self.shown[start:self.read]

    def prompt(self):
        """Waits for the prompt, and a little more: CPython's readline is deaf to a signal in the moment after it."""
        self.expect("> ")
        while self.take(0.1):
            pass
        self.read = len(self.shown)

    def send(self, keys):
        keys = keys if isinstance(keys, bytes) else keys.encode()
        for place in range(0, len(keys), 512):
            os.write(self.master, keys[place:place + 512])
            self.take(0)

    def code(self):
        """The exit code, once mm has ended."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"mm did not end: {self.shown!r}"
            self.take()
        while self.take(0):
            pass
        return self.process.returncode

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(program, tmp_path):
    terminals = []

    def start(*args, env={}, redirect='<"$TTY" >"$TTY" 2>&1', prelude=""):
        terminals.append(Terminal([sys.executable, program, *args], env, tmp_path, redirect, prelude))
        return terminals[-1]
    yield start
    for one in terminals:
        one.close()


def at(server):
    return "--url", server.url, "-m", "m"


def backend_of(provider="", url="http://127.0.0.1:1/v1", key="", model="m"):
    return mm.Backend(provider or "server", mm.PROVIDERS.get(provider, mm.PLAIN), url, model, key)


def settings_of(**values):
    settings = mm.Settings()
    for key, value in values.items():
        settings.values[key], settings.sources[key] = value, "the test"
    return settings


def talk(server, provider="", restartable=True, **values):
    return mm.Conversation(backend_of(provider, server.url), settings_of(**values), restartable=restartable)


def ask(conversation, question="hi"):
    """The events of a turn, as --json would show them."""
    shown = [event for event in conversation.ask(question) if event["type"] in mm.EVENTS]
    return [{key: value for key, value in event.items() if key in ("type", *mm.EVENTS[event["type"]])} for event in shown]


def text(events, kind="answer"):
    return "".join(event["text"] for event in events if event["type"] == kind)


def kinds(events):
    return [event["type"] for event in events]


def error(events):
    """(kind, message) of the one error among the events, or None."""
    errors = [(event["kind"], event["message"]) for event in events if event["type"] == "error"]
    assert len(errors) < 2 and "\n" not in "".join(message for _, message in errors)
    return errors[0] if errors else None


def fault(function, *args, **kwargs):
    """The MMError that a call raises."""
    with pytest.raises(mm.MMError) as caught:
        function(*args, **kwargs)
    return caught.value


# ======================================================================================================================
# Helpers: conversations, tools, files
# ======================================================================================================================

@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a config file of these bytes; -> Settings."""
    def load(content, options={}, environ={}):
        (tmp_path / "box.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return mm.load_settings(options, str(tmp_path / "box.yaml"))
    return load


@pytest.fixture
def web():
    """The `responses` library: what is not registered refuses the connection."""
    with responses.RequestsMock(assert_all_requests_are_fired=False) as web:
        yield web


def models(web, base, *names):
    web.add("GET", base + "/models", json={"object": "list", "data": [{"id": name} for name in names] or None})


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
UNSTREAMED = {"object": "chat.completion", "choices": [{"message": {"content": "ok", "reasoning_content": "hm"}, "finish_reason": "stop"}]}
CALLED = chunk(finish="tool_calls") + DONE


def look(arguments, **fields):
    return call(name="look", arguments=arguments, **fields)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, *calls):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def tool(its_id, content="done"):
    return {"role": "tool", "tool_call_id": its_id, "content": content}


def made(its_id, arguments={"q": "é"}):
    return {"id": its_id, "name": "look", "arguments": arguments, "raw": ""}


def sent(its_id, arguments='{"q": "é"}'):
    return {"id": its_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def raw(server, provider="llamacpp", template="chatml", tags=False, **values):
    conversation = talk(server, provider, **values)
    conversation.backend.entry.update(protocol="completions", template=template, thinkTags=tags)
    return mm.Conversation(conversation.backend, conversation.settings)


THOUGHT = stream(chunk(reasoning="hm "), chunk(reasoning="so"), chunk("The "), chunk("answer.") + STOP + DONE)


def plain(shown):
    """Terminal output without styles and what readline sends."""
    return re.sub(r"\x1b\[[\d;]*m|\x1b\[\?2004[hl]\r?", "", shown)


def question(server, number=1):
    return server.arrived(number).body["messages"][-1]["content"]


def strict(request):
    """The messages of a request, after everything that the strictest templates and servers insist on was checked.

    Roles are counted as Mistral's template does: tool messages and assistant messages with calls take no part.
    """
    messages = request.body["messages"]
    rest, waiting, turns = messages[messages[0]["role"] == "system":], [], []
    for message in rest:
        role, content, calls = message["role"], message["content"], message.get("tool_calls")
        assert role in ("user", "assistant", "tool") and isinstance(content, str) and calls != []
        content.encode()
        if role == "tool":
            assert message["tool_call_id"] in waiting, "a result without its call"
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting, "a call without its result"
        for made in calls or []:
            assert made["id"] and made["type"] == "function" and made["function"]["name"]
            assert isinstance(json.loads(made["function"]["arguments"]), dict)
        waiting = [made["id"] for made in calls or []]
        assert len(set(waiting)) == len(waiting)
        if not calls:
            assert content.strip(), "an empty message"
            turns.append(role)
    assert not waiting and rest[-1]["role"] != "assistant"
    assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"] * (len(turns) % 2), turns
    return messages


def calls(name, its_id="a", finish="tool_calls", index=0, **arguments):
    """The script of a stream that ends in one call."""
    return stream(call(index=index, id=its_id, name=name, arguments=json.dumps(arguments)) + chunk(finish=finish) + DONE)


def counted(prompt, produced=1, answer="ok"):
    """The script of an answer whose tokens the server counts."""
    usage = {"prompt_tokens": prompt, "completion_tokens": produced}
    return stream(chunk(answer) + STOP + sse({"choices": [], "usage": usage}) + DONE)


class Told(Server):
    """A server that also tells of itself: pages are {path: JSON, or a list of them for one look after another}."""

    def __init__(self, *scripts, pages={}):
        self.pages = {path: list(page) if isinstance(page, tuple) else [page] for path, page in pages.items()}
        super().__init__(*scripts)

    def take(self, sock):
        script, path = super().take(sock), self.gets[-1].path if self.gets else ""
        if path in self.pages and (not self.posts or script not in self.scripts):
            pages = self.pages[path]
            return reply(200, pages.pop(0) if len(pages) > 1 else pages[0])
        return script


@pytest.fixture
def tell():
    servers = []
    yield lambda *scripts, **pages: servers.append(Told(*scripts, **pages)) or servers[-1]
    for server in servers:
        server.close()


def agent(server, box=None, provider="", record=None, **values):
    values.setdefault("think", None)
    return mm.Conversation(backend_of(provider, server.url), settings_of(**values), box, record)


@pytest.fixture
def box(tmp_path, monkeypatch):
    """Makes a Toolbox in the directory `in`; answer: what its person says, None where there is none; box.asked: what for."""
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")

    def make(answer=None, commands=None, **how):
        asked = []
        made = mm.Toolbox([*mm.BUILT_IN, *(commands or {})], commands,
                          permit=(lambda *what: asked.append(what) or answer) if answer else None, **how)
        made.asked = asked
        return made
    return make


def result_of(work):
    """What a generator returns, in the end."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return ended.value


def use(box, name, raw="", **arguments):
    """(ok, output) of one call; a call that hangs fails."""
    done = []
    thread = threading.Thread(target=lambda: done.append(
        (box.preview({"id": "a", "name": name, "arguments": arguments, "raw": raw}), result_of(box.run({"id": "a", "name": name, "arguments": arguments, "raw": raw})))), daemon=True)
    thread.start()
    thread.join(PATIENCE / 2)
    assert done, f"{name} {arguments} hangs, or raised"
    return done[0][1]


@contextlib.contextmanager
def full_disk(size):
    """No file can grow past `size` bytes: a write of more is cut there, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


LIST = dict(index=0, id="a", name="list_files", arguments="{}")


def thinking(*then):
    said = [{"role": "assistant", "content": None}, {"reasoning_content": "hm"}]
    return stream(*[sse({"id": "chatcmpl-7", "model": "m", "choices": [{"index": 0, "delta": delta}]}) for delta in said], *then)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / ".local/state/mm/sessions"


def said(result):
    return result.out + result.err


def everything(messages):
    return json.dumps(messages)


# ======================================================================================================================
# 1. Settings
# ======================================================================================================================

@pytest.mark.parametrize("content, key, value", [
    ("model: no", "model", "no"), ("model: 4.0", "model", "4.0"), ("model: 22:22", "model", "22:22"),
    ("model: 2031-05-06", "model", "2031-05-06"), ("model:", "model", ""),
    ("model: ~", "model", ""), ("system: off", "system", "off"), ("showThinking: off", "showThinking", False),
    ("showThinking: Yes", "showThinking", True), ("watchdogTimeout: 5e-4", "watchdogTimeout", 0.0005),
    ("watchdogTimeout:", "watchdogTimeout", 20.0), ("retries: '3'", "retries", 3), ("maxSteps: 7.0", "maxSteps", 7),
    ("compactAt: 0", "compactAt", 0), ("tools: ~", "tools", []), ("tools:", "tools", []), ("tools: a, b", "tools", ["a", "b"]), ("tools: [a, b]", "tools", ["a", "b"]),
    ("sampling: {temperature: 5e-4, stop: '\"5\"', seed: 5, logprobs: true, x: off}", "sampling",
     {"temperature": 0.0005, "stop": "5", "seed": 5, "logprobs": True, "x": "off"}),
    ("providers: {box: {like: ollama, fallback: ~, apiKeyEnv: ~}}", "providers", {"box": {"like": "ollama"}}),
    ('{"providers": {"box": {"like": "ollama", "fallback": null, "apiKeyEnv": null}}}', "providers", {"box": {"like": "ollama"}}),
    ("providers: {box: {like: ollama, fallback: '', local: no}}", "providers",
     {"box": {"like": "ollama", "fallback": [], "local": False}}),
    ('\ufeff{\n\t"model": "j",\n\t"retries": 2}', "retries", 2), ("\ufeffmodel: b\r\nretries: 4\r\n", "retries", 4), ("", "retries", 1),
    ("# nothing but a comment\n", "retries", 1),
])
def test_a_config_value_is_what_was_written(load, content, key, value):
    assert load(content)[key] == value


@pytest.mark.parametrize("content, tokens", [
    ("retries: no", ["retries"]), ("retries: -1", ["retries"]), ("watchdogTimeout: true", ["watchdogTimeout"]),
    ("watchdogTimeout: 22:22", ["watchdogTimeout", "22:22"]), ("watchdogTimeout: .nan", ["watchdogTimeout"]),
    ("firstTokenTimeout: soon", ["firstTokenTimeout", "soon"]), ("maxSteps: 2.5", ["maxSteps", "2.5"]),
    ("compactAt: 80", ["compactAt", "80"]), ("showThinking: maybe", ["showThinking", "maybe"]), ("system: [be, short]", ["system"]),
    ("sampling: hot", ["sampling", "hot"]), ("providers: [box]", ["providers"]), ("providers: {box: 5}", ["providers.box"]),
    ("providers: {box: {url: u, local: maybe}}", ["providers.box.local", "maybe"]),
    ("providers: {box: {url: u, protocol: telepathy}}", ["providers.box.protocol", "telepathy"]), ('{"model": 5}', ["model", "quotes"]),
    ("model: a\n---\nmodel: b", ["line 2"]), ("- model: a", ["keys and values"]), ("hello", ["keys and values"]),
    ("model: a\nsampling:\n\tseed: 1", ["line 3", "tab"]), ("tools: [a, b\nmodel: m", ["line 2"]),
    ('system: "D:\\notes\\q"', ["line 1"]), ("model: `q`", ["line 1"]), ("system: *nowhere", ["line 1", "nowhere"]),
    (b"retries: 1\nsystem: na\xefve", ["line 2", "UTF-8"]), (b"\x00\x01\x02model: m", []), pytest.param("a: " + "[" * 5000, [], id="deep"),
    ("sampling: &a {b: *a}", ["line 1", "recursive"]), pytest.param('{"sampling": {"a": ' + "[" * 2000 + "]" * 2000 + "}}", [], id="deep JSON"),
])
def test_a_fault_in_the_config_is_one_line_that_names_file_and_place(load, content, tokens):
    raised = fault(load, content)
    assert raised.kind == "config" and "\n" not in raised.message
    for token in ["box.yaml", *tokens]:
        assert token in raised.message


def test_all_faults_of_a_config_are_told_at_once(load):
    lines = fault(load, "retries: no\nmodel: m\ncompactAt: 3", {"maxSteps": ("x", "--max-steps")}).message.split("\n")
    assert ["retries" in lines[0], "compactAt" in lines[1], "--max-steps" in lines[2], len(lines)] == [True, True, True, 3]


@pytest.mark.parametrize("content", [
    "apiKey: sk-hidden-1", "token: sk-hidden-1", "providers: {box: {url: u, api_key: sk-hidden-1}}",
    "providers: {box: {url: u, apiKeyEnv: sk-hidden-1}}",
])
def test_a_key_in_the_config_is_refused_and_not_shown(load, content):
    message = fault(load, content).message
    assert "environment variable" in message and "hidden" not in message


@pytest.mark.parametrize("content, tokens", [
    ("modell: m", ["modell", "model?"]), ("providers: {box: {like: ollama, urll: x}}", ["providers.box.urll", "url?"]),
    ("zzz: 1", ["zzz"]),
])
def test_an_unknown_key_is_a_notice(load, content, tokens):
    notice, = load(content).notices
    assert all(token in notice for token in tokens)


def test_an_option_beats_the_environment_which_beats_the_file(load):
    environ = {"MM_MODEL": " from-environment ", "MM_PROVIDER": " ", "MM_BASE_URL": ""}
    settings = load("model: from-file\nprovider: ollama\nretries: 5", {"retries": "2"}, environ)
    found = {key: (settings[key], settings.source(key)) for key in ("retries", "model", "provider", "url")}
    assert found == {"retries": (2, "--retries"), "model": ("from-environment", "$MM_MODEL"),
                     "provider": ("ollama", found["provider"][1]), "url": ("", "")}
    assert found["provider"][1].endswith("box.yaml: provider")


def test_without_pyyaml_a_json_config_works_and_a_yaml_one_says_what_to_install(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert load('{"model": "j"}')["model"] == "j"
    assert load("")["model"] == ""
    assert "pip install pyyaml" in fault(load, "model: j").message
    assert "box.yaml" in fault(load, '{"model": ').message


@pytest.mark.parametrize("environ, expected", [
    ({}, "home"), ({"XDG_CONFIG_HOME": "HERE/xdg"}, "xdg"),
    ({"XDG_CONFIG_HOME": "xdg"}, "home"),  # relative: not valid, so not set
    ({"XDG_CONFIG_HOME": " ", "MM_CONFIG": " "}, "home"), ({"MM_CONFIG": "HERE/named.yaml"}, "named"),
    ({"MM_CONFIG": "~/named.yaml"}, "named"),
])
def test_the_config_file_is_looked_for_where_it_may_be_and_never_in_the_current_directory(tmp_path, monkeypatch, environ, expected):
    files = {"home": ".config/mm/config.yaml", "xdg": "xdg/mm/config.yaml", "named": "named.yaml", "cwd": "config.yaml"}
    for name, path in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"model: {name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mm, "__file__", str(tmp_path / "elsewhere" / "mm.py"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value.replace("HERE", str(tmp_path)))
    assert mm.load_settings({})["model"] == expected
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.yaml").write_text("model: beside")
    assert mm.load_settings({})["model"] == ("named" if expected == "named" else "beside")


@pytest.mark.parametrize("args, env, tokens", [
    (["--config", "nowhere.yaml"], {}, ["nowhere.yaml", "--config"]), ([], {"MM_CONFIG": "gone.yaml"}, ["gone.yaml", "$MM_CONFIG"]),
    (["--config", "."], {}, ["--config"]), (["--retries", "many"], {}, ["--retries", "many"]),
    (["--watchdog", "-2"], {}, ["--watchdog"]), (["--url", "ftp://x"], {}, ["ftp://x"]),
    ([], {"MM_BASE_URL": "http://x:port"}, ["http://x:port"]), (["-p", "olama"], {}, ["--provider", "olama", "ollama"]),
    ([], {"MM_PROVIDER": "olama"}, ["$MM_PROVIDER", "olama"]), (["-o", "temperature"], {}, ["-o", "temperature"]),
    (["-o", "messages=[]"], {}, ["messages"]), (["--nonsense"], {}, ["--nonsense"]), (["-f", "missing.txt"], {}, ["-f", "missing.txt"]),
    (["-f", "."], {}, ["-f"]), (["--replay", "missing.sse"], {}, ["--replay", "missing.sse"]),
    (["--url", "http://127.0.0.1:1", "--tap", "no/dir"], {}, ["--tap", "no/dir"]),
])
def test_wrong_usage_is_one_line_and_exit_code_2(run_mm, args, env, tokens):
    result = run_mm(*args, "-m", "m", "hi", env=env)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert all(token in result.err for token in tokens), result.err


# ======================================================================================================================
# 2. Errors
# ======================================================================================================================

@pytest.mark.parametrize("body, said", [
    ({"error": {"code": 500, "message": "compute failed", "type": "server_error"}}, "compute failed"),
    ({"error": "gone fishing"}, "gone fishing"), ({"object": "error", "message": "bad top_p", "code": 400}, "bad top_p"),
    ({"code": None, "message": "runner died", "type": "error"}, "runner died"), ({"detail": "login expired"}, "login expired"),
    ({"detail": [{"loc": ["body", "top_k"], "msg": "must be an int"}]}, "body.top_k: must be an int"),
    ([{"error": {"message": "first"}}, {"error": {"message": "second"}}], "first; second"),
    ({"error": {"message": {"text": "deep"}}}, "deep"), ({"errors": ["one", "two"]}, "one; two"),
    ('{"error": {"message": "{\\"error\\": {\\"message\\": \\"inside out\\"}}"}}', "inside out"),
    ({"error": {"message": "provider failed", "metadata": {"raw": '{"error": "no GPU"}'}}}, "provider failed: no GPU"),
    ("backend not found\n", "backend not found"), ("", ""),
])
def test_the_sentence_is_found_wherever_a_server_puts_it(body, said):
    assert mm.sentence(body) == said


LLAMA_TEMPLATE = ("\n------------\nWhile executing CallExpression at line 3, column 9 in source:\n...↵ {{- raise_exception("
                  "\"only two roles\") }}...\n   ^\nError: Jinja Exception: only two roles")


@pytest.mark.parametrize("provider, status, body, kind, tokens", [
    ("vllm", 401, {"error": "Unauthorized"}, "auth", ["Unauthorized", "401", "MM_API_KEY"]),
    ("openrouter", 403, b"", "auth", ["403", "OPENROUTER_API_KEY"]),
    ("ollama", 404, {"error": {"message": "model 'm' not found"}}, "not_found", ["ollama pull m"]),
    ("dmr", 404, b"model not found\n", "not_found", ["docker model pull m"]),
    ("llamacpp", 400, {"error": {"code": 400, "message": "model 'm' not found"}}, "not_found", ["--models"]),
    ("", 404, b"404 page not found\n", "not_found", ["404", "http://127.0.0.1:1/v1/x"]),
    ("", 405, b"", "not_found", ["405", "http://127.0.0.1:1/v1/x"]),
    ("openrouter", 402, {"error": {"message": "pay first"}}, "server", ["pay first", "402", "credit"]),
    ("openai", 429, {"error": {"message": "slow down"}}, "rate_limited", ["slow down", "429"]),
    ("llamacpp", 500, {"error": {"message": "tools param requires --jinja flag"}}, "server", ["start llama-server with --jinja"]),
    ("vllm", 400, {"message": '"auto" tool choice requires --enable-auto-tool-choice'}, "server", ["--enable-auto-tool-choice"]),
    ("llamacpp", 500, {"error": {"message": LLAMA_TEMPLATE}}, "server", ["template", "only two roles"]),
    ("llamacpp", 500, {"error": {"message": "only two roles at row 3, column 9:\n{{ x }}\n ^\n"}}, "server", ["only two roles"]),
    ("llamacpp", 502, b"", "server", ["502", "127.0.0.1:1"]),
    ("llamacpp", 500, "modèle inconnu".encode("latin-1"), "server", ["modèle inconnu", "500"]),
    ("llamacpp", 500, b"", "server", ["500"]), ("llamacpp", 418, {"strange": [1, 2]}, "server", ["strange", "418"]),
    ("", 200, b"<!DOCTYPE html><html><title>Web <b>UI</b></title><script>x</script>", "not_found", ["Web", "UI", "URL"]),
    ("", 404, b"<html><head><title>\n Not Here </title>", "not_found", ["Not Here"]),
    ("", 502, b"<html><title>Bad Gateway</title>" + b"<p>" * 999, "server", ["Bad Gateway", "502"]),
    ("llamacpp", 500, {"error": "boom " + "y" * 9999}, "server", ["boom", "500"]),
    ("llamacpp", 500, {"error": "one\n\ntwo\tthree"}, "server", ["one two three"]),
])
def test_a_refusal_becomes_one_line_with_what_to_do(provider, status, body, kind, tokens):
    raised = mm.explain(status, body if isinstance(body, bytes) else json.dumps(body).encode(), backend_of(provider),
                        "http://127.0.0.1:1/v1/x")
    assert (raised.kind, len(raised.message) <= 500) == (kind, True), raised.message
    assert not re.search(r"[\n<>{]|While executing|raise_exception", raised.message.replace('{"strange"', ""))
    assert all(token in raised.message for token in tokens), raised.message


@pytest.mark.parametrize("status, body, numbers", [
    (400, {"error": {"message": "request (2100 tokens) exceeds the available context size (2048 tokens), try increasing it",
                     "type": "exceed_context_size_error", "n_prompt_tokens": 2100, "n_ctx": 2048}}, ["2,100", "2,048"]),
    (400, {"code": 400, "message": "too big, try increasing it", "type": "exceed_context_size_error",
           "n_prompt_tokens": 5001, "n_ctx": 4096}, ["5,001", "4,096"]),
    (400, {"message": "This model's maximum context length is 2048 tokens. However, your request has 2100 input tokens."},
     ["2100", "2048"]),
    (400, {"message": "You passed 2100 input tokens and requested 9 output tokens. However, the model's context length is only "
                      "2048 tokens, resulting in a maximum input length of 2039 tokens."}, ["2100", "2048"]),
    (400, {"message": "The decoder prompt (length 2100) is longer than the maximum model length of 2048."}, ["2100", "2048"]),
    (0, {"error": {"message": "Input does not fit in context length. The input has 2100 tokens, but the context length only "
                              "supports 2048 tokens."}}, ["2100", "2048"]),
    (500, {"error": "prompt too long; exceeded max context length by 52 tokens"}, ["52"]),
    (0, {"error": {"code": 500, "message": "Context size has been exceeded."}}, ["Context size"]),
    (413, b"the prompt is longer than the context", ["larger context"]),
])
def test_a_context_overflow_tells_its_two_numbers(status, body, numbers):
    raised = mm.explain(status, body, backend_of("llamacpp"), "")
    assert raised.kind == "overflow" and all(number in raised.message for number in numbers), raised.message


def test_an_error_that_echoes_the_key_does_not_show_it(serve, run_mm):
    server = serve(reply(401, {"error": {"message": "the key sk-very-secret is not valid"}}))
    result = run_mm(*at(server), "hi", env={"MM_API_KEY": "sk-very-secret"})
    assert result.code == 1 and "sk-very-secret" not in result.out + result.err and "not valid" in result.err


@pytest.mark.parametrize("url, tokens", [
    ("http://127.0.0.1:1/v1", ["127.0.0.1", "refused"]),
    ("http://user:hidden@127.0.0.1:1/v1?key=hidden", ["127.0.0.1:1/v1", "refused"]), ("http://nowhere.test/v1", ["nowhere.test"]),
    ("https://127.0.0.1:PORT/v1", ["TLS", "http"]),
])
def test_what_cannot_be_reached_is_named(serve, monkeypatch, url, tokens):
    def unknown(host, *rest, real=socket.getaddrinfo):
        if host.endswith(".test"):
            raise socket.gaierror(-2, "Name or service not known")
        return real(host, *rest)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    server = serve(reply(400))
    events = ask(mm.Conversation(backend_of("llamacpp", url.replace("PORT", str(server.port))), settings_of()))
    kind, message = error(events)
    assert kind == "unreachable" and all(token in message for token in tokens) and "hidden" not in message, message
    assert kinds(events)[-1] == "done"


def test_a_refused_connection_says_how_the_server_is_started_and_what_localhost_is_in_a_container(monkeypatch):
    for inside in (True, False):
        monkeypatch.setattr(mm, "in_container", lambda: inside)
        _, message = error(ask(mm.Conversation(backend_of("ollama"), settings_of())))
        assert "ollama serve" in message and ("host.docker.internal" in message) == inside


# ======================================================================================================================
# 3. Providers
# ======================================================================================================================

def test_an_address_of_a_family_that_this_machine_lacks_is_passed_over(serve, monkeypatch):
    server = serve(stream(OK))
    addresses = [(999, socket.SOCK_STREAM, 0, "", ("::1", server.port)), (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: addresses)
    assert text(ask(talk(server))) == "ok"


def test_certificates_that_are_not_there_are_named_by_their_variable(run_mm):
    result = run_mm("--url", "https://127.0.0.1:1/v1", "-m", "m", "--json", "hi", env={"REQUESTS_CA_BUNDLE": "/nowhere.pem"})
    assert error(result.events)[0] == "config" and "REQUESTS_CA_BUNDLE" in error(result.events)[1] and len(result.events) <= 3


@pytest.mark.parametrize("text, url", [
    ("http://10.0.0.5:8080", "http://10.0.0.5:8080/v1"), ("http://10.0.0.5:8080/", "http://10.0.0.5:8080/v1"),
    ("  http://box/v1/  ", "http://box/v1"), ("HTTP://box//v1//", "http://box/v1"), ("http://box/v1/chat/completions", "http://box/v1"),
    ("http://box/v1/completions/", "http://box/v1"), ("http://box/v1/models", "http://box/v1"),
    ("http://box/engines/llama.cpp/v1", "http://box/engines/llama.cpp/v1"), ("https://box/api/v3", "https://box/api/v3"),
    ("localhost:8080", "http://localhost:8080/v1"), ("box:9000/v1", "http://box:9000/v1"), ("192.168.1.7", "http://192.168.1.7/v1"),
    ("[::1]:8080", "http://[::1]:8080/v1"), ("http://[::1]", "http://[::1]/v1"), ("api.example.com/v1", "https://api.example.com/v1"),
])
def test_every_form_of_a_base_url_is_understood(text, url):
    assert mm.base_url(text)[0] == url


@pytest.mark.parametrize("text", ["ftp://box", "http://", "http://box:port", "http://box:99999", "http://a b", "http://[::1", "file:///x"])
def test_what_is_no_url_is_refused(text):
    assert fault(mm.base_url, text).kind == "config"


def test_a_query_in_the_url_is_kept_and_stands_at_the_end(serve):
    server = serve(stream(OK))
    ask(mm.Conversation(backend_of(url=server.root + "/api/?version=2"), settings_of()))
    assert server.arrived().path == "/api/chat/completions?version=2"


@pytest.mark.parametrize("a, b, same", [
    ("smollm2", "ai/smollm2:latest", True), ("Qwen3:8b", "qwen3:8b", True), ("hf.co/X/Y", "huggingface.co/x/y:latest", True),
    ("qwen3:8b", "qwen3:14b", False), ("qwen3", "qwen3:8b", False),
])
def test_model_names_are_compared_as_the_servers_do(a, b, same):
    assert mm.same_model(a, b) is same


def resolved(**values):
    """(provider, URL, model, notices) of these settings."""
    settings, notices = settings_of(**values), []
    backend = mm.resolve(settings, mm.candidates(settings, notices.append), notices.append)
    return backend.name, backend.url, backend.model, " ".join(notices)


DMR, LLAMA, OLLAMA = "http://localhost:12434/engines/v1", "http://localhost:8080/v1", "http://localhost:11434/v1"
NEWER_LLAMA = "http://localhost:9931/v1"
FAR_DMR, FAR_OLLAMA = "http://model-runner.docker.internal/engines/v1", "http://host.docker.internal:11434/v1"


@pytest.mark.parametrize("there, values, used", [
    ({OLLAMA: ["q"], LLAMA: ["a", "b"]}, {}, ("llamacpp", LLAMA, "a")),                       # the first in the table's order
    ({OLLAMA: ["q"], LLAMA: []}, {}, ("ollama", OLLAMA, "q")),                                # a server without models is no use
    ({OLLAMA: ["q"], FAR_DMR: ["ai/x:latest"]}, {}, ("ollama", OLLAMA, "q")),                 # this machine first, then a container's host
    ({FAR_DMR: ["ai/x:latest"]}, {}, ("dmr", FAR_DMR, "ai/x:latest")),
    ({FAR_OLLAMA: ["q"], LLAMA: ["a"]}, {"provider": "ollama"}, ("ollama", FAR_OLLAMA, "q")),  # a named provider at its fallback
    ({OLLAMA: ["q"], FAR_OLLAMA: ["r"]}, {"provider": "ollama"}, ("ollama", OLLAMA, "q")),
    ({NEWER_LLAMA: ["a"], FAR_DMR: ["ai/x"], OLLAMA: ["q"]}, {}, ("llamacpp", NEWER_LLAMA, "a")),
    ({NEWER_LLAMA: ["a"]}, {"provider": "llamacpp"}, ("llamacpp", NEWER_LLAMA, "a")),
])
def test_the_server_and_the_model_that_nobody_named_are_found_and_told(web, there, values, used):
    web.add("GET", DMR + "/models", body="no API here", status=404)
    for base, names in there.items():
        models(web, base, *names)
    *found, notices = resolved(**values)
    assert tuple(found) == used and used[2] in notices
    assert (used[1] in notices) == (not values or used[1] in (FAR_OLLAMA, NEWER_LLAMA))


def test_when_no_server_answers_the_line_says_what_was_tried(web):
    raised = fault(resolved)
    assert raised.kind == "unreachable" and all(f":{port}" in raised.message for port in (12434, 8080, 11434, 8000, 1234))


@pytest.mark.parametrize("values", [
    {"provider": "ollama", "url": "http://10.1.1.1:7"}, {"provider": "ollama", "providers": {"ollama": {"fallback": []}}},
    {"provider": "box", "providers": {"box": {"like": "ollama", "url": "http://10.1.1.1:7"}}},
])
def test_a_url_or_an_empty_fallback_skips_the_probe(web, values):
    resolved(model="m", **values)
    assert len(web.calls) == 0


@pytest.mark.parametrize("port, name", [
    (12434, "dmr"), (8080, "llamacpp"), (9931, "llamacpp"), (11434, "ollama"), (8000, "vllm"), (1234, "lmstudio"), (9, "server"),
])
def test_with_a_url_alone_the_port_tells_the_server(web, port, name):
    assert resolved(url=f"http://box:{port}", model="m")[:2] == (name, f"http://box:{port}/v1")


def test_an_own_provider_takes_what_it_does_not_say_from_the_one_it_is_like(serve):
    server = serve(stream(OK))
    own = {"box": {"like": "llamacpp", "url": server.url, "model": "own", "sampling": {"top_k": 5}}}
    settings = settings_of(provider="box", providers=own)
    backend = mm.resolve(settings, mm.candidates(settings, print), print)
    ask(mm.Conversation(backend, settings_of()))
    assert {"model": "own", "top_k": 5, "return_progress": True}.items() <= server.arrived().body.items()


@pytest.mark.parametrize("values, tokens", [
    ({"provider": "zzz"}, ["zzz", "llamacpp"]),
    ({"provider": "box", "providers": {"box": {"like": "zzz"}}}, ["box", "zzz", "llamacpp"]),
    ({"provider": "box", "providers": {"box": {"model": "m"}}}, ["box", "url"]), ({"provider": "openai"}, ["$OPENAI_API_KEY"]),
    ({"provider": "openai", "url": "http://box/v1"}, ["-m"]),
])
def test_a_provider_that_cannot_be_used_is_a_config_error(web, values, tokens):
    raised = fault(resolved, **values)
    assert raised.kind == "config" and all(token in raised.message for token in tokens), raised.message


def test_without_a_model_the_first_that_chats_and_is_loaded_is_used(web):
    entries = [{"id": "nomic-embed"}, {"id": "cold", "status": {"value": "unloaded"}}, {"id": "warm", "status": {"value": "loaded"}}]
    web.add("GET", "http://box:8080/v1/models", json={"data": entries})
    assert resolved(url="http://box:8080")[2] == "warm"


@pytest.mark.parametrize("answer, kind, tokens", [
    ({"json": {"data": None}}, "not_found", ["ollama pull"]), ({"body": "<html>"}, "not_found", ["http://box:11434/v1/models"]),
    ({"status": 401}, "auth", ["401", "MM_API_KEY"]), ({"body": OSError("no")}, "interrupted", ["http://box:11434"]),
])
def test_a_server_that_tells_no_model_is_explained(web, answer, kind, tokens):
    web.add("GET", "http://box:11434/v1/models", **answer)
    raised = fault(resolved, url="http://box:11434")
    assert raised.kind == kind and all(token in raised.message for token in tokens), raised.message


@pytest.mark.parametrize("provider, pages, window", [
    ("llamacpp", {"/v1/models": {"data": [{"id": "m", "meta": {"n_ctx": 1024, "n_ctx_train": 8192}}]}}, 1024),
    ("llamacpp", {"/v1/models": {"data": [{"id": "m", "meta": {"n_ctx_train": 8192}}]},
                  "/props": {"default_generation_settings": {"n_ctx": 2048}}}, 2048),
    ("llamacpp", {"/v1/models": {"data": [{"id": "m"}]}, "/props": {"default_generation_settings": {"n_ctx": 0}}}, 0),
    ("dmr", {"/v1/models": {"data": [{"id": "ai/m:latest", "dmr": {"context_window": 4096}}]}, "/engines/_configure": []}, 4096),
    ("dmr", {"/v1/models": {"data": [{"id": "ai/m:latest", "dmr": {"context_window": 4096}}]},
             "/engines/_configure": [{"Model": "ai/m", "Config": {"context-size": 8192}}]}, 8192),
    ("ollama", {"/v1/models": {"data": []}, "/api/ps": {"models": [{"name": "n", "context_length": 1},
                                                                   {"name": "m:latest", "context_length": 4096}]}}, 4096),
    ("vllm", {"/v1/models": {"data": [{"id": "m", "max_model_len": 512}]}}, 512),
    ("lmstudio", {"/v1/models": {"data": []}, "/api/v0/models": {"data": [{"id": "m", "loaded_context_length": 99}]}}, 99),
    ("openrouter", {"/v1/models": {"data": [{"id": "x", "context_length": 7}, {"id": "m", "context_length": 8}]}}, 8),
    ("ollama", {"/v1/models": ["odd"], "/api/ps": {"models": "odd"}}, 0),
])
def test_the_probe_finds_the_context_that_is_served(web, provider, pages, window):
    for path, page in pages.items():
        web.add("GET", "http://box" + path, json=page)
    assert mm.probe(backend_of(provider, "http://box/v1"))["window"] == window


@pytest.mark.parametrize("provider, key, sent", [
    ("", "", None), ("llamacpp", "", "Bearer none"), ("openai", "", None), ("openai", "k1", "Bearer k1"), ("llamacpp", "k1", "Bearer k1"),
])
def test_a_key_goes_out_only_where_there_is_one_and_a_local_server_gets_a_dummy(serve, provider, key, sent):
    server = serve(stream(OK))
    ask(mm.Conversation(backend_of(provider, server.url, key), settings_of()))
    assert server.arrived().headers.get("authorization") == sent


def test_a_key_is_stripped_and_a_blank_one_is_none(serve, run_mm):
    server = serve(stream(OK))
    for value in ("  k1\n", " ", ""):
        run_mm(*at(server), "hi", env={"MM_API_KEY": value})
    assert [post.headers.get("authorization") for post in server.posts] == ["Bearer k1", None, None]


@pytest.mark.parametrize("key, place", [("sk-\u200bsecret", 4), ("sk-secret\u2026", 10), ("sé", 2), ("a b", 2), ("a\nb", 2)])
def test_a_key_that_no_header_can_carry_is_refused_by_its_variable_and_place_alone(serve, run_mm, key, place):
    result = run_mm(*at(serve(stream(OK))), "hi", env={"MM_API_KEY": key})
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "$MM_API_KEY" in result.err and str(place) in result.err and "secret" not in result.err


def test_netrc_is_not_consulted(serve, run_mm, tmp_path):
    server = serve(stream(OK))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hidden\n")
    (tmp_path / ".netrc").chmod(0o600)
    for key in ("k1", ""):
        run_mm(*at(server), "hi", env={"MM_API_KEY": key, "NETRC": str(tmp_path / ".netrc")})
    assert [post.headers.get("authorization") for post in server.posts] == ["Bearer k1", None]


def through_a_proxy(monkeypatch, proxy, url):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    return ask(mm.Conversation(backend_of(url=url), settings_of()))


def test_loopback_never_goes_through_a_proxy(serve, monkeypatch):
    proxy, server = serve(reply(503)), serve(stream(OK))
    for host in ("127.0.0.1", "localhost"):
        assert text(through_a_proxy(monkeypatch, proxy.root, f"http://{host}:{server.port}")) == "ok"
    assert not proxy.posts


def test_other_hosts_go_through_the_proxy_unless_no_proxy_names_them(serve, monkeypatch):
    proxy, server = serve(stream(OK)), serve(stream(OK))
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: real("127.0.0.1" if host == "models.test" else host, *rest))
    url = f"http://models.test:{server.port}/v1"
    through_a_proxy(monkeypatch, proxy.root, url)
    assert proxy.arrived().path == url + "/chat/completions" and not server.posts
    monkeypatch.setenv("no_proxy", "models.test")
    through_a_proxy(monkeypatch, proxy.root, url)
    assert (len(proxy.posts), len(server.posts)) == (1, 1)


def test_a_proxy_that_does_not_answer_is_named_without_its_password(monkeypatch):
    kind, message = error(through_a_proxy(monkeypatch, "http://me:hidden@127.0.0.1:1", "http://models.test/v1"))
    assert kind == "unreachable" and "127.0.0.1:1" in message and "NO_PROXY" in message and "hidden" not in message


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_localhost_is_reached_on_either_of_its_addresses(serve, monkeypatch, host):
    try:
        server = serve(stream(OK), host=host)
    except OSError:
        pytest.skip("this machine has no IPv6")
    both = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, *_: [(kind, socket.SOCK_STREAM, 6, "", (at, port)) for kind, at in both])
    conversation = mm.Conversation(backend_of(url=f"http://localhost:{server.port}"), settings_of())
    assert text(ask(conversation)) == "ok"
    server.close()
    assert "refused" in error(ask(conversation))[1]


# ======================================================================================================================
# 4. The wire
# ======================================================================================================================

def bytewise(body):
    return [body[place:place + 1] for place in range(len(body))]


def rows_of(pieces):
    """The lines that requests makes of a body which arrives in these pieces, read through a Tap."""
    pieces, response = iter(pieces), requests.Response()
    response.raw = mm.Tap(SimpleNamespace(read1=lambda size: next(pieces, b"")))
    return response.iter_lines()


def test_lines_end_at_lf_crlf_and_cr_wherever_the_packets_are_cut():
    body = "a\nb\r\nc\rd\r\r\n\n\u2028e\u0085✓\n\r\nf".encode()
    whole = list(rows_of([body]))
    assert [line.decode() for line in whole] == ["a", "b", "c", "d", "", "", "\u2028e\u0085✓", "", "f"]
    assert list(rows_of(bytewise(body))) == whole
    for cut in range(1, len(body)):
        assert list(rows_of([body[:cut], body[cut:]])) == whole


def test_a_cr_at_the_end_of_a_packet_ends_its_line_at_once():
    assert next(rows_of(iter([b"a\r", None]))) == b"a"  # asking for the second piece would fail


def read(*pieces):
    """What mm makes of a body that comes in these pieces."""
    reply, events, raised = mm.Reply(), [], None
    try:
        events += mm.read_reply(mm.deltas(rows_of(pieces), backend_of(key="sk-k1"), "http://box/v1/chat/completions"), reply)
    except mm.MMError as error:
        raised = (error.kind, error.message)
    calls = [(call["name"], call["arguments"]) for call in reply.calls.finished()]
    return SimpleNamespace(thinking=text(events, "reasoning"), answer=reply.answer.getvalue(), calls=calls, usage=reply.usage,
                           finish=reply.finish, error=raised, progress=[e for e in events if e["type"] == "progress"])

# -- how an end is judged

def ended(reason, *before):
    return b"".join(before) + chunk(finish=reason)


@pytest.mark.parametrize("reason", ["network_error", "insufficient_system_resource", "engine_overloaded", "abort"])
def test_an_end_that_says_the_server_failed_is_asked_again_and_its_call_is_not_run(serve, box, reason):
    call_of_it = call(index=0, id="a", name="list_files", arguments="{}")
    server = serve(stream(ended(reason, call_of_it)), stream(OK))
    events = ask(agent(server, box("y")))
    assert kinds(events) == ["retry", "answer", "done"] and len(server.posts) == 2 and reason in events[0]["reason"]


@pytest.mark.parametrize("reason, kind", [("network_error", "server"), ("length", "empty")])
def test_the_end_of_a_second_choice_counts_where_it_holds_a_call(serve, box, reason, kind):
    fragment = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "list_files", "arguments": "{}"}}]}
    first = {"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}
    second = sse({"choices": [first, {"index": 1, "delta": fragment}]}, {"choices": [{"index": 1, "delta": {}, "finish_reason": reason}]})
    events = ask(agent(serve(stream(second)), box("y"), retries=0))
    assert "tool_call" not in kinds(events) and kind in [event.get("kind") for event in events]


@pytest.mark.parametrize("reason", ["", "null"])
def test_an_end_that_says_nothing_is_none_and_no_call_of_it_runs(serve, box, reason):
    whole_call = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "list_files", "arguments": "{}"}}]}
    torn = sse({"choices": [{"index": 0, "delta": whole_call, "message": None, "finish_reason": reason}]})
    events = ask(agent(serve(stream(torn)), box("y"), retries=0))
    assert error(events)[0] == "interrupted" and "tool_call" not in kinds(events)


@pytest.mark.parametrize("reason", ["content_filter", "who_knows"])
def test_no_call_runs_behind_an_end_that_is_not_known_to_be_good(serve, box, reason):
    events = ask(agent(serve(stream(ended(reason, call(index=0, id="a", name="list_files", arguments="{}")))), box("y"), retries=0))
    assert "tool_call" not in kinds(events)


@pytest.mark.parametrize("reason, tokens", [
    ("stop", None), ("eos", None), ("end_turn", None), ("length", ["max_tokens"]), ("model_context_window_exceeded", ["model_context_window_exceeded"]),
    ("content_filter", ["filter"]), ("sensitive", ["filter", "sensitive"]), ("no_more_ink", ["no_more_ink"]),
])
def test_other_ends_end_an_answer_and_odd_ones_are_named(serve, reason, tokens):
    events = ask(talk(serve(stream(ended(reason, chunk("ok"))))))
    notices = [event["message"] for event in events if event["type"] == "notice"]
    assert text(events) == "ok" and error(events) is None and len(notices) == bool(tokens)
    assert all(token in notices[0] for token in tokens or [])


@pytest.mark.parametrize("reason", ["content_filter", "refusal"])
def test_a_filter_that_lets_nothing_through_is_named(serve, reason):
    kind, message = error(ask(talk(serve(stream(ended(reason))))))
    assert kind == "empty" and "filter" in message and reason in message


@pytest.mark.parametrize("steps", [
    [chunk("o", finish="stop"), 0.3, chunk("k", finish="stop"), DONE], [chunk("", finish="stop"), 0.3, chunk("o"), chunk("k") + STOP + DONE],
    [chunk(reasoning="hm", finish="stop"), 0.3, chunk("o", finish="stop"), 0.6, chunk("k", finish="stop") + DONE],
    [chunk("o") + STOP, 0.1, chunk("k") + DONE], [chunk("o", finish="stop"), 0.8, chunk("k", finish="stop") + DONE], [chunk("ok") + STOP, "reset"], [chunk("ok") + STOP + sse(b"noise \xf0\x9f") + b"data: {\n\n"],
    *[[chunk("ok") + STOP + sse(mark), "hang"] for mark in (b"DONE", b"[done]", b"[END]", b'"[DONE]"')],
    [sse(b"one moment") + OK], [b"data: {\"half\": \n\n" + OK],
    [chunk("ok") + sse({"choices": [{"index": 0, "delta": {}, "message": {"content": "ok"}, "finish_reason": "stop"}]})],
], ids=range(14))
def test_a_whole_answer_is_whole_whatever_stands_around_its_end(serve, monkeypatch, steps):
    monkeypatch.setattr(mm, "GRACE_SECONDS", 0.5)
    events = ask(talk(serve(stream(*steps)), watchdogTimeout=5.0, retries=0))
    assert (text(events), error(events)) == ("ok", None)


def test_a_body_that_lost_its_last_chunk_is_whole_all_the_same(serve):
    short = [HEAD + b"Content-Length: 99999\r\n\r\n", chunk("ok") + STOP]
    for script in (short, chunked(chunk("ok") + STOP)[:-1]):
        assert error(ask(talk(serve(script), retries=0))) is None


def test_noise_is_the_error_where_a_stream_does_not_end_well(serve):
    kind, message = error(ask(talk(serve(stream(chunk("half") + sse(b"worker 3 ran out of memory"))), retries=0)))
    assert kind == "server" and "worker 3 ran out of memory" in message


def test_a_choice_is_found_by_its_index():
    def choices(*rows):
        return sse({"choices": [{"index": index, "delta": delta} for index, delta in rows]})
    look = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "look", "arguments": "{}"}}]}
    assert read(choices((1, {"content": "no"}), (0, {"content": "ok"})) + STOP).answer == "ok"
    found = read(choices((0, {"content": "ok"}), (1, look)) + STOP)
    assert (found.answer, found.calls) == ("ok", [("look", {})])
    legacy = chunk(function_call={"name": "look", "arguments": '{"q": '}) + chunk(function_call={"arguments": '"x"}'}) + STOP
    assert read(legacy).calls == [("look", {"q": "x"})]


@pytest.mark.parametrize("body, message", [
    ({"base_resp": {"status_code": 1004, "status_msg": "login fail"}}, "login fail"), ({"code": 40301, "msg": "no quota", "success": False}, "no quota"),
    ({"base_resp": {"status_code": 0, "status_msg": ""}}, None), ({"code": 0, "message": "Success"}, None),
    ({"error": {"message": "", "code": None}}, None), ({"error": {"code": "0", "message": "success"}}, None), ({"code": "00000", "msg": "OK"}, None),
    ({"code": 20000, "msg": "fine", "success": True}, None), ({"detail": None}, None), ({"base_resp": {"status_code": "0"}}, None),
    ({"choices": [{"delta": {"content": "ok"}, "error": {"code": "", "message": ""}, "finish_reason": "stop"}]}, None),
    ({"detail": "no such thing"}, "no such thing"), ({"error": {"code": 7, "message": "success"}}, "success"),
])
def test_an_error_beside_a_200_is_told_from_a_success(body, message):
    good = {"choices": [{"index": 0, "delta": {"content": "ok"}, "finish_reason": "stop"}]}
    found = read(sse(body if message else {**good, **body}))
    assert (found.error and message in found.error[1]) if message else (found.answer, found.error) == ("ok", None)


def test_an_answer_of_pictures_or_sound_alone_is_told_of(serve):
    for delta, kind in (({"audio": {"data": "AAAA"}}, "audio"), ({"images": [{"image_url": {"url": "data:"}}]}, "image")):
        events = ask(talk(serve(stream(chunk(**delta) + STOP))))
        assert [kind in event["message"] for event in events if event["type"] == "notice"] == [True] and error(events) is None


def test_line_breaks_inside_the_strings_of_arguments_are_read():
    assert read(call(index=0, id="a", name="look", arguments='{"q": "a\n\tb"}') + STOP).calls == [("look", {"q": "a\n\tb"})]
    assert read(b'data: {"choices": [{"delta": {"content": "a\tb"}, "finish_reason": "stop"}]}\n\n').answer == "a\tb"


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in {
    "events as they should be": chunk("o") + chunk("k") + STOP + DONE,
    "no space after the colon": OK.replace(b"data: ", b"data:"),
    "more spaces after the colon": OK.replace(b"data: ", b"data:   ").replace(b"[DONE]", b"[DONE] "),
    "CRLF": OK.replace(b"\n", b"\r\n"),
    "CR": OK.replace(b"\n", b"\r"),
    "a byte order mark": b"\xef\xbb\xbf" + OK,
    "empty lines first": b"\n\r\n\n" + OK,
    "comments everywhere": b":\n\n: ping\n\n" + OK.replace(b"data:", b": x\ndata:") + b":\n\n",
    "id, retry and unknown fields": OK.replace(b"data:", b"id: 1\nretry: 5\nwhatever: 1\nlonely\ndata:"),
    "a named event": OK.replace(b"data:", b"event: message\ndata:"),
    "a gateway's comment as data": sse(b": WAIT") + OK + sse(b": WAIT"),
    "an empty data line": sse(b"", b"  ") + b"data\n\n" + OK,
    "several values in the lines of one event": chunk("o").strip() + b"\n" + chunk("k").strip() + b"\n" + STOP + DONE,
    "no blank lines at all": OK.replace(b"\n\n", b"\n"),
    "a value over several lines": sse(json.dumps(json.loads(chunk("ok")[6:]), indent=1).replace("\n", "\ndata:").encode()) + STOP,
    "values that are no objects": sse(5, "x", [], True, None, [1]) + OK,
    "no choices, in every way": sse({"choices": []}, {"choices": None}, {"model": "m"}, {"choices": [None]}, {}) + OK,
    "every optional key null": chunk(None, role=None, tool_calls=None, function_call=None) + sse(
        {"usage": None, "timings": None, "choices": [{"index": None, "delta": None, "finish_reason": None}]}) + OK,
    "empty deltas": chunk("") + chunk(role="assistant") + OK,
    "odd types of content": chunk(5) + chunk(True) + chunk({"x": 1}) + chunk([5, None, {"type": "image"}]) + OK,
    "content as a list of parts": chunk([{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]) + STOP,
    "the finish_reason with the last text": chunk("o") + chunk("k", finish="stop"),
    "a finish_reason and no [DONE]": chunk("ok") + STOP,
    "a [DONE] and no finish_reason": chunk("ok") + DONE,
    "no newline at the end": (chunk("ok") + STOP).rstrip(),
    "anything after [DONE]": OK + b"data: {torn\n\nerror: late\n\n",
    "a text_completion": sse({"choices": [{"text": "ok", "index": 0}]}, {"choices": [{"text": "", "finish_reason": "stop"}]}),
    "a second choice": sse({"choices": [{"index": 1, "delta": {"content": "no"}}]}) + OK,
    "gzip": gzip.compress(OK),
    "a whole JSON answer": json.dumps({**UNSTREAMED, "choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}).encode(),
    "JSON and a [DONE]": json.dumps({"choices": [{"message": {"content": "ok"}}]}, indent=2).encode() + b"\n\ndata: [DONE]\n\n",
    "blank lines before JSON": b"\n\n\n" + json.dumps({"choices": [{"message": {"content": "ok"}}]}).encode(),
}.items()])
def test_an_answer_is_read_from(body):
    for pieces in ([body], bytewise(body)):
        result = read(*pieces)
        assert (result.answer, result.thinking, result.error) == ("ok", "", None)


@pytest.mark.parametrize("body, thinking, answer", [
    (chunk(reasoning="hm ") + chunk(reasoning="so") + OK, "hm so", "ok"),
    (chunk(reasoning="hm", content=None) + chunk(content="") + OK, "hm", "ok"),
    (chunk(reasoning="hm", content="") + chunk(reasoning="", content="ok") + STOP, "hm", "ok"),
    (chunk(reasoning="hm", content="ok") + STOP, "hm", "ok"),
    (chunk(reasoning="hm ") + chunk("o") + chunk(reasoning="again") + chunk("k") + STOP, "hm again", "ok"),
    (chunk(reasoning="a") + chunk(**{"reasoning": "b"}) + chunk(thinking="c") + OK, "abc", "ok"),
    (chunk(reasoning_content="hm", **{"thinking": "hm"}) + OK, "hm", "ok"),
    (sse({"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]}) + OK, "hm", "ok"),
    (sse({"choices": [{"delta": {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}}]}) + OK, "hm", "ok"),
    (chunk(reasoning_details=[{"text": "h"}, {"summary": "m"}, {"type": "reasoning.encrypted", "data": "x"}]) + OK, "hm", "ok"),
    (chunk(reasoning={"text": "hm"}) + OK, "hm", "ok"),
    (chunk([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "ok"}]) + STOP, "hm", "ok"),
    (chunk(reasoning="Plan", content="Plan") + OK, "Plan", "ok"),  # a gateway copies the thinking into content
    (json.dumps(UNSTREAMED).encode(), "hm", "ok"),
    (chunk("<think>x</think>") + OK, "", "<think>x</think>ok"),  # only the field is thinking
    (chunk("Write `</th") + chunk("ink>`.") + STOP, "", "Write `</think>`."),
])
def test_thinking_and_answer_are_told_apart(body, thinking, answer):
    result = read(body)
    assert (result.thinking, result.answer, result.error) == (thinking, answer, None)


@pytest.mark.parametrize("pieces, answer", [
    (["\ud83d", "\ude00!"], "😀!"),                  # the halves of a pair in two deltas
    (["a\ud83d", "b", "\ude00"], "a\ufffdb\ufffd"),  # lone halves
    (["\ufeffa", "\x00b"], "\ufeffa\x00b"),
])
def test_escaped_characters_are_put_together(pieces, answer):
    assert read(b"".join(map(chunk, pieces)) + STOP).answer == answer


def test_raw_characters_stay_whole_wherever_the_packets_are_cut():
    raw = "进✓\u0085\u2028é🌍"
    body = chunk("TEXT").replace(b"TEXT", raw.encode()) + STOP
    assert read(body).answer == read(*bytewise(body)).answer == raw


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in {
    "an object": LOST, "then [DONE]": LOST + DONE, "after text": HALF + LOST, "after the end": HALF + STOP + LOST,
    "a string": sse({"error": "slot lost"}), "a list": sse({"error": ["slot lost"]}), "a detail": b'{"detail": "slot lost"}',
    "with choices": sse({"error": {"message": "slot lost"}, "choices": [{"delta": {}, "finish_reason": "error"}]}),
    "inside a choice": sse({"choices": [{"error": {"message": "slot lost"}, "delta": {}}]}),
    "type error": sse({"type": "error", "message": "slot lost"}), "object error": sse({"object": "error", "message": "slot lost"}),
    "a code and a message": sse({"code": 400, "message": "slot lost"}), "text as data": sse(b"slot lost"),
    "an event named error": b'event: error\ndata: {"message": "slot lost"}\n\n', "with text": b"event:error\ndata:slot lost\n\n",
    "a line named error": b'error: {"code": 400, "message": "slot lost"}\n\n' + DONE,
    "written into the stream": HALF + b'{"error": {"message": "slot lost"}}\n\n',
    "instead of a stream": b'{"error": {"message": "slot lost"}}', "with the key": sse({"error": "slot lost by sk-k1"}),
}.items()])
def test_an_error_inside_a_200_is_found(body):
    for pieces in ([body], bytewise(body)):
        kind, message = read(*pieces).error
        assert kind == "server" and "slot lost" in message and "\n" not in message and "sk-k1" not in message


@pytest.mark.parametrize("body, kind, token", [pytest.param(body, kind, token, id=name) for name, body, kind, token in [
    ("nothing", b"", "interrupted", "empty"), ("comments alone", b": ping\n\n", "interrupted", "empty"),
    ("text and a tidy close", HALF, "interrupted", "before"), ("a line cut", HALF + HALF[:-20], "interrupted", "before"),
    ("a JSON body cut", json.dumps(UNSTREAMED).encode()[:-9], "interrupted", "before"),
    ("a finish_reason error", chunk("half", finish="error"), "server", "error"),
    ("text instead of a stream", b"slot lost\n", "protocol", "slot lost"),
    ("a page instead of a stream", b"<!doctype html>\n<title>My UI</title>", "not_found", "My UI"),
    ("data that is not JSON", sse(b'{"choices": [{"delta"'), "protocol", "not JSON"),
    ("gzip cut short", gzip.compress(HALF * 50 + OK)[:-40], "interrupted", ""),
    ("gzip damaged", gzip.compress(OK)[:10] + b"\xff" * 30, "protocol", "compress"),
]])
def test_no_answer_is_made_of(body, kind, token):
    for pieces in ([body] if body else [], bytewise(body)):
        raised = read(*pieces).error
        assert raised and raised[0] == kind and token in raised[1] and "\n" not in raised[1], raised


def test_usage_is_the_last_that_came_wherever_it_came():
    early = usage(total_tokens=1)
    late = usage(**USAGE)
    assert read(early + chunk("ok") + STOP + late + DONE).usage == USAGE
    assert read(late + chunk("ok") + sse({"choices": [], "usage": None}) + STOP).usage == USAGE


def test_prompt_progress_counts_what_is_not_in_the_cache():
    body = b"".join(sse({"choices": [], "prompt_progress": {"total": 100, "cache": 20, "processed": n}}) for n in (20, 60, 100)) + OK
    assert [(e["processed"], e["total"]) for e in read(body).progress] == [(0, 80), (40, 80), (80, 80)]


RED, BLUE = ("look", {"q": "red"}), ("look", {"q": "blue"})


@pytest.mark.parametrize("body, calls", [pytest.param(body, calls, id=name) for name, body, calls in [
    ("in fragments", look('{"q":', index=0, id="a") + call(index=0, arguments='"red"}'), [RED]),
    ("two, in order", look('{"q":"red"}', index=0, id="a") + look('{"q":"blue"}', index=1, id="b"), [RED, BLUE]),
    ("two, all with index 0", look('{"q":"red"}', index=0, id="a") + look('{"q":"blue"}', index=0, id="b"), [RED, BLUE]),
    ("two, with neither index nor id", look('{"q":"red"}') + look('{"q":"blue"}'), [RED, BLUE]),
    ("two in turns, by index", look('{"q":', index=0, id="a") + look('{"q":', index=1, id="b")
     + call(index=0, arguments='"red"}') + call(index=1, arguments='"blue"}'), [RED, BLUE]),
    ("two in turns, by id", look('{"q":', id="a") + look('{"q":', id="b")
     + call(id="a", arguments='"red"}') + call(id="b", arguments='"blue"}'), [RED, BLUE]),
    ("two in one delta", chunk(tool_calls=[{"index": place, "function": {"name": name, "arguments": json.dumps(arguments)}}
                                           for place, (name, arguments) in enumerate((RED, BLUE))]), [RED, BLUE]),
    ("id and name empty later", look('{"q":', index=0, id="a") + call(index=0, id="", name="", arguments='"red"}'), [RED]),
    ("id and name null later", look('{"q":', index=0, id="a") + call(index=0, id=None, name=None, arguments='"red"}'), [RED]),
    ("id and name repeated", look('{"q":', index=0, id="a") + look('"red"}', index=0, id="a"), [RED]),
    ("the name later", call(index=0, id="a", name="", arguments="") + look('{"q":"red"}', index=0), [RED]),
    ("the index counting up", look('{"q"', index=0, id="a") + call(index=1, arguments=':"re') + call(index=2, arguments='d"}'), [RED]),
    ("arguments as an object", look({"q": "red"}, index=0), [RED]), ("encoded twice", look('"{\\"q\\": \\"red\\"}"', index=0), [RED]),
    ("arguments empty", look(" ", index=0), [("look", {})]), ("arguments null", look(None, index=0), [("look", {})]),
    ("arguments missing", call(index=0, name="now"), [("now", {})]), ("arguments cut", look('{"q":"re', index=0), [("look", None)]),
    ("arguments that are a list", look("[1]", index=0), [("look", None)]),
    ("entries that are null", chunk(tool_calls=[None, {"index": 0, "function": None}]) + call(index=0, name="now"), [("now", {})]),
]])
def test_a_tool_call_is_put_together_from(body, calls):
    assert read(body + CALLED).calls == read(*bytewise(body + STOP)).calls == calls


@pytest.mark.parametrize("ids", [[None, None], ["", ""], ["x", "x"], ["call00001", None]])
def test_every_tool_call_gets_an_id_of_its_own(ids):
    calls = mm.Calls()
    for place, its_id in enumerate(ids):
        calls.add({"index": place, "id": its_id or "", "name": "now", "arguments": "{}", "extra": {}})
    made = [call["id"] for call in calls.finished()]
    assert len(set(made)) == 2 and all(made)


@pytest.mark.parametrize("body", [
    b"data: " + b"x" * 2000, chunk("x" * 2000), b'{"choices": [\n' + b"\n" * 2000, b"data: x\n" * 2000,
    b"".join(call(index=0, name="n", arguments="x" * 500) for _ in range(4)),
])
def test_what_never_ends_is_given_up(monkeypatch, body):
    monkeypatch.setattr(mm, "MAX_LINE", 1000)
    assert read(*[body[place:place + 300] for place in range(0, len(body), 300)]).error[0] == "protocol"


@pytest.mark.parametrize("body", [chunk("x" * 600) * 2, chunk(reasoning="x" * 600) * 2])
def test_an_answer_that_never_ends_is_given_up(serve, monkeypatch, body):
    monkeypatch.setattr(mm, "MAX_LINE", 1000)
    assert error(ask(talk(serve(stream(body, STOP)), "llamacpp", reasoningEcho=True)))[0] == "protocol"


@pytest.mark.fuzz
def test_an_error_that_unpacks_to_gigabytes_is_an_error(serve, run_mm):
    bomb = gzip.compress(gzip.compress(bytes(1 << 30), 9), 9)
    server = serve(reply(500, bomb, Content_Encoding="gzip, gzip"))
    result = run_mm(*at(server), "--json", "hi", prelude="ulimit -v 800000;")
    assert error(result.events)[0] == "server" and result.code == 1


def test_a_fragment_that_says_nothing_is_no_call(serve):
    server = serve(stream(chunk("hi", tool_calls=[{}, {"index": 0, "function": {"arguments": ""}}]), STOP))
    events = ask(talk(server))
    assert text(events) == "hi" and "tool_result" not in kinds(events) and len(server.posts) == 1


def test_arguments_are_not_parsed_for_every_fragment_that_repeats_the_name(monkeypatch):
    parsed, parse = [], mm.parse_arguments
    monkeypatch.setattr(mm, "parse_arguments", lambda raw: parsed.append(raw) or parse(raw))
    calls = mm.Calls()
    for part in ['{"a": "', *['}'] * 500, *["x"] * 500, '"}']:
        calls.add({"index": 0, "id": "", "name": "f", "arguments": part, "extra": {}})
    assert [call["arguments"] for call in calls.finished()] == [{"a": "}" * 500 + "x" * 500}] and len(parsed) < 10


@pytest.mark.parametrize("script", [stream, chunked])
@pytest.mark.parametrize("json_option, first", [([], b"first"), (["--json"], b'{"type": "answer", "text": "first"}\n')])
def test_a_token_is_shown_before_the_server_sends_the_next(serve, start_mm, script, json_option, first):
    shown = threading.Event()
    server = serve(script(chunk("first"), shown, chunk(" second") + STOP + DONE))
    process = start_mm(*at(server), *json_option, "hi")
    got = b""
    while len(got) < len(first):
        got += os.read(process.stdout.fileno(), 1000)
    assert got == first
    shown.set()
    assert b" second" in process.communicate(timeout=PATIENCE)[0]


def test_thinking_in_a_pipe_is_shown_before_the_server_sends_the_answer(serve, start_mm):
    shown = threading.Event()
    process = start_mm(*at(serve(stream(chunk(reasoning="hm"), shown, OK))), "hi")
    assert os.read(process.stderr.fileno(), 1000) == b"hm"
    shown.set()
    assert process.communicate(timeout=PATIENCE)[0] == b"ok\n"


BODY = chunk(reasoning="hm é") + b": ping\r\n\r\n" + chunk("o") + chunk("k ✓") + STOP + usage(**USAGE) + DONE


@pytest.mark.parametrize("script, body", [
    (stream(*bytewise(BODY)), BODY), (chunked(BODY[:99], BODY[99:]), BODY), (stream(gzip.compress(BODY)), gzip.compress(BODY)),
    (reply(200, UNSTREAMED), json.dumps(UNSTREAMED).encode()), (stream(HALF, LOST), HALF + LOST),
], ids=["unchunked", "chunked", "gzip", "JSON", "broken"])
def test_a_tap_holds_the_bytes_as_they_came_and_its_replay_gives_the_same_events(serve, run_mm, tmp_path, script, body):
    live = run_mm(*at(serve(script)), "--retries", "0", "--json", "--tap", "tap", "hi")
    assert (tmp_path / "tap").read_bytes() == body
    again = run_mm("--json", "--replay", "tap")
    assert again.events[:-1] == live.events[:-1] and again.code == live.code
    assert [again.events[-1][key] for key in ("finish_reason", "usage")] == [live.events[-1][key] for key in ("finish_reason", "usage")]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_tap_that_cannot_be_written_is_told_once_and_the_stream_goes_on(serve, run_mm):
    result = run_mm(*at(serve(stream(chunk("o"), chunk("k") + STOP + DONE))), "--tap", "/dev/full", "hi")
    assert (result.code, result.out, result.err.count("--tap")) == (0, "ok\n", 1)


# ======================================================================================================================
# 5. The watchdog
# ======================================================================================================================

@pytest.fixture
def no_thread_left():
    """No thread of mm's may be left when the test ends."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name != "server":
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.mark.parametrize("script", [["hang"], stream("hang"), stream((b": ping\n\n", 0.05)), stream((chunk("") + chunk(role="x"), 0.05))])
def test_silence_before_the_first_token_ends_the_call(serve, no_thread_left, script):
    server = serve(script)
    kind, message = error(ask(talk(server, firstTokenTimeout=0.3, watchdogTimeout=9.0)))
    assert kind == "stalled" and "--first-token" in message and "firstTokenTimeout" in message
    server.gone()
    assert len(server.posts) == 1


@pytest.mark.parametrize("token", [{"content": "a"}, {"reasoning": "a"}, {"tool_calls": [{"index": 0, "function": {"name": "n"}}]}])
@pytest.mark.parametrize("after", ["hang", (b":\n\n" + chunk(""), 0.05)])
def test_silence_between_tokens_ends_the_call(serve, no_thread_left, token, after):
    server = serve(stream(chunk(**token), after))
    kind, message = error(ask(talk(server, firstTokenTimeout=9.0, watchdogTimeout=0.3)))
    assert kind == "stalled" and "--watchdog" in message and "watchdogTimeout" in message
    assert "start" not in message
    server.gone()


@pytest.mark.parametrize("sign", [
    [chunk(reasoning="a")] * 6, [chunk("a")] * 6, [call(index=0, arguments="a")] * 6,
    [sse({"choices": [], "prompt_progress": {"total": 6, "cache": 0, "processed": n}}) for n in range(6)],
], ids=["thinking", "answer", "arguments", "progress"])
def test_a_sign_of_life_keeps_a_call_alive_longer_than_either_limit(serve, sign):
    steps = [step for piece in sign for step in (piece, 0.08)]
    server = serve(stream(*steps, OK), stream(OK))
    assert error(ask(talk(server, firstTokenTimeout=0.32, watchdogTimeout=0.32))) is None


def test_progress_that_does_not_move_is_no_sign_of_life(serve):
    server = serve(stream((sse({"choices": [], "prompt_progress": {"total": 8, "cache": 0, "processed": 3}}), 0.05)))
    assert error(ask(talk(server, firstTokenTimeout=0.3)))[0] == "stalled"


def test_a_limit_of_0_is_no_limit(serve):
    events = ask(talk(serve([0.2, *stream(chunk("o"), 0.2, chunk("k") + STOP)]), firstTokenTimeout=0.0, watchdogTimeout=0.0))
    assert (text(events), error(events)) == ("ok", None)


def test_an_answer_is_over_at_its_end_though_the_socket_stays_open(serve, no_thread_left, monkeypatch):
    monkeypatch.setattr(mm, "GRACE_SECONDS", 0.1)
    for end in (DONE, STOP + DONE, STOP):
        server = serve(stream(chunk("ok") + end, "hang"))
        events = ask(talk(server, watchdogTimeout=9.0))
        assert (text(events), error(events)) == ("ok", None)
        server.gone()


def test_usage_that_comes_after_the_finish_reason_is_waited_for(serve):
    events = ask(talk(serve(stream(chunk("ok") + STOP, 0.1, usage(**USAGE) + DONE))))
    assert events[-1]["usage"] == USAGE


@pytest.mark.parametrize("script", [["hang"], stream("hang"), stream(chunk(reasoning="hm"), "hang"), stream(chunk("a"), "hang")],
                         ids=["before the headers", "before a token", "thinking", "answering"])
def test_a_call_can_be_stopped_at_any_moment(serve, no_thread_left, script):
    server = serve(script)
    conversation, events = talk(server), []
    if len(script) < 3:
        threading.Thread(target=lambda: server.arrived() and conversation.interrupt()).start()
    for event in conversation.ask("hi"):
        events.append(event)
        if event["type"] in ("answer", "reasoning"):
            conversation.interrupt()
    assert error(events)[0] == "cancelled" and kinds(events)[-1] == "done"
    server.gone()


def test_a_turn_that_is_dropped_in_the_middle_leaves_nothing_open(serve, no_thread_left):
    server = serve(stream(HALF, "hang"))
    conversation = talk(server)
    turn = conversation.ask("hi")
    while next(turn)["type"] != "answer":
        pass
    turn.close()
    server.gone()
    assert conversation.history[-1] == {"role": "assistant", "content": "half"}


def test_a_normal_call_leaves_nothing_open(serve, no_thread_left):
    server = serve(chunked(OK, "hang"))
    assert text(ask(talk(server))) == "ok"
    server.gone()


def test_a_slow_reader_holds_the_server_back(serve, monkeypatch):
    monkeypatch.setattr(mm, "BACKLOG", 20)
    conversation = talk(serve(stream(*[chunk("a")] * 500, OK)))
    turn = conversation.ask("hi")
    while next(turn)["type"] != "answer":
        pass
    assert conversation.call.box.qsize() < 200
    assert text(turn) == "a" * 499 + "ok"


# ======================================================================================================================
# 6. Requests
# ======================================================================================================================

@pytest.mark.parametrize("history, messages", [pytest.param(history, messages, id=name) for name, history, messages in [
    ("a chat", [user("a"), assistant("b"), user("c")], [user("a"), assistant("b"), user("c")]),
    ("questions without answers are joined", [user("a"), user("b"), assistant("c")], [user("a\n\nb"), assistant("c")]),
    ("an empty answer is left out", [user("a"), assistant(" \n"), user("b")], [user("a\n\nb")]),
    ("mm's own labels are left out", [user("a"), {**assistant("b"), "origin": {"text": "hm"}}], [user("a"), assistant("b")]),
    ("a call and its result", [user("a"), assistant("", made("1")), tool("1"), assistant("b")],
     [user("a"), assistant("", sent("1")), tool("1"), assistant("b")]),
    ("broken arguments become none", [user("a"), assistant("x", made("1", None)), tool("1")],
     [user("a"), assistant("x", sent("1", "{}")), tool("1")]),
    ("a call without a result gets one", [user("a"), assistant("", made("1"), made("2")), tool("2"), assistant("b")],
     [user("a"), assistant("", sent("1"), sent("2")), tool("1", mm.NO_RESULT), tool("2"), assistant("b")]),
    ("at the end as well", [user("a"), assistant("", made("1"))], [user("a"), assistant("", sent("1")), tool("1", mm.NO_RESULT)]),
    ("a turn without an answer gets one", [user("a"), assistant("", made("1")), tool("1"), user("b")],
     [user("a"), assistant("", sent("1")), tool("1"), assistant(mm.NO_ANSWER), user("b")]),
    ("an answer without a question gets one", [assistant("b"), user("c")], [user(mm.NO_QUESTION), assistant("b"), user("c")]),
    ("a result without a call is left out", [user("a"), tool("9"), assistant("b")], [user("a"), assistant("b")]),
    ("a second result is left out", [user("a"), assistant("", made("1")), tool("1"), tool("1"), assistant("b")],
     [user("a"), assistant("", sent("1")), tool("1"), assistant("b")]),
    ("an answer after a call is not joined to it", [user("a"), assistant("x", made("1")), assistant("y")],
     [user("a"), assistant("x", sent("1")), tool("1", mm.NO_RESULT), assistant("y")]),
]])
def test_a_history_is_put_right_on_its_way_out(history, messages):
    assert mm.to_messages(history, "") == messages
    assert mm.to_messages(history, "be kind") == [{"role": "system", "content": "be kind"}, *messages]


def test_no_lone_surrogate_goes_out_and_other_text_goes_out_as_it_is():
    raw = mm.serialised({"a\udce9": ["é\ud83d\ude00", {"b": "\ud800"}], "n": 1.5})
    assert raw.decode() == '{"a\ufffd":["é😀",{"b":"\ufffd"}],"n":1.5}'


LOOKED = chunk(reasoning="I look") + call(index=0, id="a", name="list_files", arguments="{}") + chunk(finish="tool_calls") + DONE
THEN = chunk(reasoning="I see") + OK


def thinker(server, box, provider="llamacpp", **values):
    return agent(server, box, provider, reasoningEcho=True, compactAt=0, **values)


@pytest.mark.parametrize("provider, field", [("llamacpp", "reasoning_content"), ("dmr", "reasoning_content"), ("lmstudio", "reasoning_content"),
                                             ("ollama", "reasoning"), ("vllm", "reasoning"), ("openrouter", None), ("", None)])
def test_thinking_goes_back_to_a_local_server_in_the_field_that_it_reads(serve, box, provider, field):
    server = serve(stream(LOOKED), stream(THEN), stream(OK))
    conversation = thinker(server, box("y"), provider)
    ask(conversation)
    ask(conversation, "and?")
    fields = [sorted(set(message) & {"reasoning_content", "reasoning", "origin"}) for message in server.arrived(3).body["messages"]]
    assert fields == [[], [field] if field else [], [], [field] if field else [], []]
    assert [message[field] for message in server.posts[2].body["messages"] if field in message] == (["I look", "I see"] if field else [])


def test_without_the_setting_no_byte_of_a_request_is_another(serve, box):
    bodies = []
    for thought in (chunk(reasoning="I look"), b""):
        server = serve(stream(thought + LOOKED.replace(chunk(reasoning="I look"), b"")), stream(OK))
        ask(agent(server, mm.Toolbox(["list_files"]), "llamacpp"))
        bodies.append(json.dumps(server.arrived(2).body))
        assert not [get for get in server.gets if "template" in get.path]
    assert bodies[0] == bodies[1] and "reasoning_content" not in bodies[0]


def qwen(messages):
    """A prompt as Qwen3's template makes it: of thinking, only what follows the last question."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "user")
    return "".join(message["content"] + message.get("reasoning_content", "") * (place > last) for place, message in enumerate(messages))


def nothing(messages):
    return "".join(message["content"] for message in messages)


def echoed(post, field="reasoning_content"):
    return [message.get(field) for message in post.body["messages"] if message["role"] == "assistant"]


@pytest.mark.parametrize("render, sent", [(everything, [["I look"], ["I look", "I see"]]), (qwen, [["I look"], [None, None]]),
                                          (nothing, [[None], [None, None]]), (None, [["I look"], ["I look", "I see"]])])
def test_the_template_decides_which_thinking_is_sent_and_counted(serve, box, render, sent):
    def played(thought, more):
        return stream(thought.replace(DONE, b"") + usage(prompt_tokens=100, completion_tokens=50, completion_tokens_details={"reasoning_tokens": 40}) + more)
    server = serve(played(LOOKED, DONE), played(THEN, DONE), stream(OK))
    server.render = render
    conversation = thinker(server, box("y"))
    turn = conversation.ask("hi")
    for event in turn:
        if event["type"] == "tool_result":
            size = conversation.size()  # 100 of the prompt, 10 of the call, some of the result; 40 of the thinking
    assert (150 <= size < 190) == (sent[0] != [None]) and 110 <= size < 190
    ask(conversation, "and?")
    assert [echoed(server.arrived(number)) for number in (2, 3)] == sent
    assert len([get for get in server.gets if get.path == "/apply-template"]) == 1


def test_thinking_goes_to_the_model_that_made_it_alone(serve, box):
    other = OK.replace(b'"m"', b'"n"')
    server = serve(stream(THEN), stream(OK), stream(other), stream(other), stream(OK))
    conversation = thinker(server, box())
    ask(conversation)
    conversation.backend.model = "other"
    ask(conversation)
    assert echoed(server.arrived(2)) == [None]
    conversation.backend.model = "m"
    ask(conversation)
    assert echoed(server.arrived(3)) == ["I see", None]
    ask(conversation)  # behind that name is another model now
    assert echoed(server.arrived(4)) == [None, None, None]


def test_what_mm_itself_parted_from_the_answer_does_not_go_back(serve, box):
    server = serve(stream(chunk("<think>hm</think>ok") + STOP), stream(OK))
    conversation = thinker(server, box())
    conversation.backend.entry["thinkTags"] = True
    conversation = mm.Conversation(conversation.backend, conversation.settings)
    assert text(ask(conversation), "reasoning") == "hm"
    ask(conversation)
    assert echoed(server.arrived(2)) == [None]


def test_no_message_goes_back_with_thinking_alone(serve, box):
    server = serve(stream(chunk(reasoning="hm") + STOP), stream(OK))
    conversation = thinker(server, box())
    ask(conversation)
    ask(conversation, "again")
    assert [message["role"] for message in server.arrived(2).body["messages"]] == ["user"]

# -- what strict servers insist on

def insisting(field="reasoning_content", words="the {} of this call must come back with it"):
    """A POST's script of a server that takes no calls back without their thinking."""
    def script(request, place):
        for message in request.body["messages"]:
            if message.get("tool_calls") and not message.get(field):
                return reply(400, {"error": {"message": words.format(field)}})
        return stream(LOOKED) if place == 0 else stream(OK)
    return script


@pytest.mark.parametrize("provider, posts", [("deepseek", 2), ("", 3), ("llamacpp", 3)])
def test_thinking_goes_back_with_its_calls_where_a_server_insists(serve, box, provider, posts):
    server = serve()
    server.script = insisting()
    conversation = agent(server, box("y"), provider)
    events = ask(conversation)
    assert (text(events), error(events), len(server.posts)) == ("ok", None, posts)
    ask(conversation, "and?")
    assert echoed(server.posts[-1]) == ["I look", None] and len(server.posts) == posts + 1


def test_where_the_thinking_is_not_known_any_more_a_space_stands_for_it(serve, box):
    server = serve()
    server.script = insisting()
    conversation = agent(server, box("y"), "deepseek")
    conversation.history += [user("hi"), assistant("", made("c12345678")), tool("c12345678"), assistant("done")]
    assert error(ask(conversation)) is None and echoed(server.arrived())[0] == " "


def test_what_a_server_adds_goes_back_to_it_unchanged_and_stays_out_of_the_session(serve, box):
    signed = {"google": {"thought_signature": "c2ln"}}
    details = [{"type": "reasoning.text", "text": "hm", "index": 0}, {"type": "reasoning.encrypted", "data": "ZW5j", "index": 1}]
    first = sse({"model": "m", "choices": [{"delta": {"reasoning_details": details[:1]}}]}) + \
        sse({"model": "m", "choices": [{"delta": {"reasoning_details": details[1:], "tool_calls": [
            {"index": 0, "id": "a", "extra_content": signed, "function": {"name": "list_files", "arguments": "{}"}}]}}]}) + chunk(finish="tool_calls")
    server, recorded = serve(stream(first), stream(OK)), []
    conversation = agent(server, box("y"), record=recorded.append)
    ask(conversation)
    message = server.arrived(2).body["messages"][1]
    assert message["reasoning_details"] == details and message["tool_calls"][0]["extra_content"] == signed
    assert "c2ln" not in str(recorded) and "ZW5j" not in str(recorded)
    conversation.backend.model = "other"
    ask(conversation, "and?")
    assert "c2ln" not in str(server.arrived(3).body) and "ZW5j" not in str(server.arrived(3).body)


@pytest.mark.parametrize("name", ["look<|channel|>x", "functions.look", 'look" path="a', "a" * 80, "größe"])
def test_names_and_ids_go_out_in_a_form_that_every_server_takes(serve, box, name):
    server = serve(stream(call(index=0, id="functions.look:0", name=name, arguments="{}") + chunk(finish="tool_calls")), stream(OK))
    conversation = agent(server, box("y"))
    assert error(ask(conversation)) is None
    _, asked, result = server.arrived(2).body["messages"]
    assert re.fullmatch("[A-Za-z0-9_-]{1,64}", asked["tool_calls"][0]["function"]["name"])
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"] == "functions.look:0"  # to the server that made it
    other = agent(server, box=None)
    other.history += conversation.history
    ask(other, "and?")
    _, asked, result, *_ = server.arrived(3).body["messages"]
    assert re.fullmatch("[A-Za-z0-9]{9}", result["tool_call_id"]) and asked["tool_calls"][0]["id"] == result["tool_call_id"]


REFUSED = "Cannot pass both content and thinking in an assistant message with tool calls!"


@pytest.mark.parametrize("status, words, again", [(500, REFUSED, True), (400, "template error: reasoning_content", True),
                                                  (500, "Failed to parse input at pos 3: thinking", False), (500, "out of memory", False)])
def test_a_template_that_refuses_thinking_gets_none_from_then_on(serve, box, status, words, again):
    refusal = reply(status, {"error": {"message": words}})
    server = serve(stream(LOOKED), refusal, stream(THEN), stream(OK))
    conversation = thinker(server, box("y"))
    events = ask(conversation)
    if not again:
        assert kinds(events)[-2:] == ["error", "done"] and len(server.posts) == 2
        return
    assert text(events) == "ok" and kinds(events).count("notice") == 1
    assert "notice" not in kinds(ask(conversation, "and?"))
    assert [echoed(server.arrived(number)) for number in (2, 3, 4)] == [["I look"], [None], [None, None]]


def test_an_overflow_first_takes_the_thinking_out_then_sums_up_then_says_the_two_numbers(serve, box):
    full = reply(400, {"error": {"message": "too long", "type": "exceed_context_size_error", "n_prompt_tokens": 1823, "n_ctx": 1024}})
    summary = stream(chunk("all was well") + STOP)
    server = serve(stream(THEN), full, full, summary, full)
    conversation = thinker(server, box())
    conversation.settings.values["compactAt"] = 0.8
    ask(conversation)
    events = ask(conversation, "and?")
    assert [echoed(post) for post in server.posts] == [[], ["I see"], [None], [], []]
    assert "all was well" in json.dumps(server.posts[4].body) and "I see" not in json.dumps(server.posts[3].body)
    assert error(events)[0] == "overflow" and "1,823" in error(events)[1] and "1,024" in error(events)[1] and len(server.posts) == 5


def test_a_saved_session_does_not_hold_the_thinking(serve, run_mm, tmp_path):
    server = serve(stream(THEN), stream(OK), stream(OK))
    (tmp_path / "c.yaml").write_text("reasoningEcho: true")
    result = run_mm("--config", "c.yaml", "-p", "llamacpp", *at(server), "-i", stdin="hi\nand?\n")
    assert result.code == 0 and echoed(server.arrived(2)) == ["I see"]
    saved = b"".join(path.read_bytes() for path in (tmp_path / ".local/state/mm/sessions").iterdir())
    assert b"and?" in saved and b"I see" not in saved and b"origin" not in saved
    run_mm("--config", "c.yaml", "-p", "llamacpp", *at(server), "-c", "more")
    assert echoed(server.arrived(3)) == [None, None]


# ======================================================================================================================
# 7. Protocols
# ======================================================================================================================

def parted(opened, *pieces, whole=True):
    """(thinking, answer) that ThinkTags make of the pieces."""
    incoming = [("answer", piece) for piece in pieces] + [("finish", "stop")] * whole
    told = collections.defaultdict(str)
    for kind, value in mm.split_thinking(iter(incoming), mm.ThinkTags(opened)):
        told[kind] += value
    return told["reasoning"].strip(), told["answer"]


@pytest.mark.parametrize("opened, body, thinking, answer", [
    (False, "<think>I add.</think>4", "I add.", "4"), (False, "\n<think>\nI add.\n</think>\n\n4", "I add.", "4"),
    (False, "just 4", "", "just 4"), (False, "  4 < 5 </th", "", "  4 < 5 </th"), (False, "<thin", "", "<thin"), (False, "", "", ""),
    (False, "Write `<think>` to open and `</think>` to close.", "", "Write `<think>` to open and `</think>` to close."),
    (False, "So:\n```\n</think>\n```\n", "", "So:\n```\n</think>\n```\n"), (False, "<b>x</b>", "", "<b>x</b>"),
    (False, "<think>a</think>b <think>c</think> </think>", "a", "b <think>c</think> </think>"),  # one block, and it leads
    (False, "<think>\n\n</think>\n\n4", "", "4"), (False, "</think>4", "", "4"), (False, "a </think> b", "", "a </think> b"),
    (True, "I add.\n</think>\n\n4", "I add.", "4"), (True, "<think>I add.</think>4", "I add.", "4"),
    (True, "I ad", "I ad", ""), (True, "I ad </th", "I ad </th", ""), (True, "</think>4", "", "4"),
    (True, "an odd ` here</think>4 `</think>`", "an odd ` here", "4 `</think>`"),  # the first one ends it
])
def test_thinking_in_tags_is_parted_from_the_answer_wherever_a_delta_ends(opened, body, thinking, answer):
    assert parted(opened, body) == parted(opened, *body) == (thinking, answer)
    for cut in range(len(body)):
        assert parted(opened, body[:cut], body[cut:]) == (thinking, answer)


def test_thinking_in_an_open_block_is_no_answer_when_its_stream_breaks(serve):
    conversation = talk(serve(stream(chunk("I add <")), stream(chunk("I add") + chunk("</think>4") + STOP)))
    conversation.backend.entry["thinkTags"] = "open"
    events = [event for event in conversation.ask("hi") if event["type"] != "waiting"]
    assert [(event["type"], event.get("text")) for event in events[:-1]] == [
        ("reasoning", "I add "), ("reasoning", "<"), ("retry", None), ("reasoning", "I add"), ("answer", "4")]


def test_what_may_be_a_tag_is_shown_when_the_stream_falls_silent(serve):
    conversation = talk(serve(stream(chunk("I add </t"), "hang")), watchdogTimeout=0.2)
    conversation.backend.entry["thinkTags"] = "open"
    events = ask(conversation)
    assert text(events, "reasoning") == "I add </t" and error(events)[0] == "stalled"


def test_an_unstreamed_answer_without_tags_is_whole(serve):
    conversation = talk(serve(reply(200, {"choices": [{"message": {"role": "assistant", "content": "ok"}}]})))
    conversation.backend.entry["thinkTags"] = True
    assert text(ask(conversation)) == "ok"


@pytest.mark.parametrize("tags, think, answer", [
    ("open", None, "4"), (True, True, "4"), (True, None, "hm</think>4"), ("open", False, "hm</think>4")])
def test_think_tags_are_looked_for_where_the_config_says_so(serve, tags, think, answer):
    conversation = talk(serve(stream(chunk("hm</th") + chunk("ink>4") + STOP)), think=think)
    assert text(ask(conversation)) == "hm</think>4"
    conversation.backend.entry["thinkTags"] = tags
    events = ask(conversation)
    assert text(events) == answer and text(events, "reasoning") == ("hm" if answer == "4" else "")


def test_a_lone_closing_tag_names_the_setting_once(serve):
    conversation = talk(serve(stream(chunk("hm\n</think>\n\n4") + STOP), stream(chunk("Write `</think>`") + STOP)))
    notices = [event["message"] for event in ask(conversation) + ask(conversation) if event["type"] == "notice"]
    assert len(notices) == 1 and "thinkTags: open" in notices[0]


def test_a_closing_tag_that_the_server_left_behind_is_dropped(serve):
    conversation = talk(serve(stream(chunk(reasoning="hm") + chunk("</think>\n4 </think>") + STOP)))
    conversation.backend.entry["thinkTags"] = "open"
    events = ask(conversation)
    assert (text(events, "reasoning"), text(events)) == ("hm", "4 </think>")


@pytest.mark.parametrize("provider, think, fields", [
    ("", None, {}), ("", False, {}), ("llamacpp", None, {"stream_options": {"include_usage": True}, "return_progress": True}),
    ("dmr", False, {"chat_template_kwargs": {"enable_thinking": False}, "return_progress": True}),
    ("ollama", False, {"reasoning_effort": "none"}), ("ollama", True, {"reasoning_effort": "medium"}),
    ("vllm", False, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    ("deepseek", True, {"thinking": {"type": "enabled"}}), ("openrouter", False, {"reasoning": {"enabled": False}}),
])
def test_a_request_has_the_fields_that_its_server_knows(serve, provider, think, fields):
    server = serve(stream(OK))
    ask(talk(server, provider, think=think))
    body = server.arrived().body
    assert {"model": "m", "messages": [user("hi")], "stream": True}.items() <= body.items()
    assert fields.items() <= body.items()
    if not provider:
        assert set(body) == {"model", "messages", "stream"}


def test_a_request_asks_for_no_compression_and_says_what_it_is(serve):
    server = serve(stream(OK))
    ask(talk(server))
    headers = server.arrived().headers
    assert (headers["accept-encoding"], headers["content-type"]) == ("identity", "application/json")


def test_sampling_options_go_out_as_they_are(serve, run_mm, tmp_path):
    server = serve(reply(200, UNSTREAMED))
    (tmp_path / "c.yaml").write_text("sampling: {temperature: 0.1, chat_template_kwargs: {a: 1}}\n")
    fields = ["temperature=5e-1", 'stop=["a", "b"]', "user=5 b", "empty=", "stream=false",
              "chat_template_kwargs.b=true", "chat_template_kwargs.c=x=y"]
    options = [word for field in fields for word in ("-o", field)]
    result = run_mm("--config", "c.yaml", "-p", "llamacpp", *at(server), *options, "--no-think", "hi")
    body = server.arrived().body
    expected = {"temperature": 0.5, "stop": ["a", "b"], "user": "5 b", "empty": "", "stream": False,
                "chat_template_kwargs": {"enable_thinking": False, "a": 1, "b": True, "c": "x=y"}}
    assert {key: body.get(key) for key in expected} == expected
    assert result.out == "ok\n" and "stream_options" not in body


@pytest.mark.parametrize("status, target", [
    (301, "/v2/chat/completions"), (302, "/v2/chat/completions"), (303, "/x"),
    (307, "/v1/chat/completions"), (307, "http://127.0.0.2:9/v1"), (308, "https://other.test/v1?token=hidden"),
])
def test_a_redirect_is_told_with_its_target(serve, status, target):
    server = serve(reply(status, Location=target))
    kind, message = error(ask(talk(server)))
    assert kind == "not_found" and target.split("?")[0] in message and "hidden" not in message
    assert len(server.posts) == 1 and not server.gets


@pytest.mark.parametrize("value, seconds", [
    ("7", 7), (" 2 ", 2), ("", None), ("soon", None), ("-5", None),
])
def test_retry_after_is_seconds(value, seconds):
    assert mm.retry_after({"Retry-After": value}) == seconds


def raw_chunk(text, finish=None):
    return sse({"choices": [{"text": text, "index": 0, "finish_reason": finish}]})


@pytest.mark.parametrize("template, prompt, stop", [
    ("chatml", "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
               "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
    ("llama3", "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
               "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
               "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ("gemma", "<start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
              "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
    ("mistral", "[INST]S\n\na[/INST]b</s>[INST]c[/INST]", "</s>"),
])
def test_a_raw_prompt_is_what_the_format_s_template_makes(serve, template, prompt, stop):
    server = serve(stream(raw_chunk("b") + raw_chunk("", "stop")))
    conversation = raw(server, template=template, system="S")
    assert text(ask(conversation, "a")) == "b"
    ask(conversation, "c")
    body = server.arrived(2).body
    assert (server.posts[1].path, body["prompt"], body["stop"], body["stream"]) == ("/v1/completions", prompt, [stop], True)
    assert "messages" not in body and "reasoning_control" not in body and body["return_progress"] is True


def test_the_formats_that_the_config_takes_are_those_that_there_are():
    assert set(mm.FORMATS) == set(mm.TEMPLATES)


@pytest.mark.parametrize("tags, think, end, thinking, answer", [
    (False, None, "assistant\n", "", "hm</think>4"), (True, None, "<think>\n", "hm", "4"), (False, True, "<think>\n", "hm", "4"),
    (True, False, "<think>\n\n</think>\n\n", "", "hm</think>4"),
])
def test_the_prompt_opens_the_thinking_block_or_closes_it(serve, tags, think, end, thinking, answer):
    server = serve(stream(raw_chunk("hm</thi") + raw_chunk("nk>4") + raw_chunk("", "stop")))
    events = ask(raw(server, tags=tags, think=think))
    assert server.arrived().body["prompt"].endswith(end)
    assert (text(events, "reasoning"), text(events)) == (thinking, answer)


def test_a_budget_that_went_into_a_block_without_end_is_said(serve):
    events = ask(raw(serve(stream(raw_chunk("hm ") + raw_chunk("hm", "length"))), think=True))
    assert text(events, "reasoning") == "hm hm" and "whole budget" in events[-2]["message"]


def test_raw_prompts_are_not_cut_at_the_few_tokens_that_openai_s_protocol_gives_them(serve):
    server = serve(stream(raw_chunk("ok", "stop")))
    for provider in ("vllm", "llamacpp"):
        ask(raw(server, provider))
    assert [post.body.get("max_tokens") for post in server.posts] == [mm.ENTRY_DEFAULTS["limit"]["max_tokens"], None]


def test_calls_and_results_of_a_history_are_text_in_a_raw_prompt(serve):
    server = serve(stream(raw_chunk("ok", "stop")))
    conversation = raw(server)
    conversation.history += [user("a"), assistant("", made("1", {"q": "x"})), tool("1", "found")]
    ask(conversation, "b")
    prompt = server.arrived().body["prompt"]
    assert prompt.index("look") < prompt.index("found") < prompt.index("b<|im_end|>") and prompt.count("<|im_start|>") == 6


def gguf(pairs, order="<", version=3, magic=b"GGUF", count=None):
    """A GGUF header: {key: text, int, float, [texts], or (type, bytes) as it is}."""
    def string(text):
        raw = text.encode()
        return struct.pack(order + "Q", len(raw)) + raw

    def value(content):
        if isinstance(content, tuple):
            return struct.pack(order + "I", content[0]) + content[1]
        if isinstance(content, list):
            return struct.pack(order + "IIQ", 9, 8, len(content)) + b"".join(map(string, content))
        if isinstance(content, str):
            return struct.pack(order + "I", 8) + string(content)
        return struct.pack(order + ("If" if isinstance(content, float) else "II"), 6 if isinstance(content, float) else 4, content)
    head = struct.pack(order + "IQQ", version, 0, len(pairs) if count is None else count)
    return magic + head + b"".join(string(key) + value(content) for key, content in pairs.items())


MODEL = {"general.name": "small", "x.rate": 0.5, "tokenizer.ggml.tokens": ["<pad>", "né", "<|im_end|>"], "tokenizer.ggml.eos_token_id": 2,
         "tokenizer.chat_template": "{{ '<|im_start|>' }}"}
TEMPLATE = MODEL["tokenizer.chat_template"]


@pytest.mark.parametrize("pairs, how, told", [
    (MODEL, {}, (TEMPLATE, "chatml")), (dict(reversed(MODEL.items())), {"version": 2}, (TEMPLATE, "chatml")),
    ({**MODEL, "a": (9, struct.pack("<IQ", 5, 2) + b"12345678"), "b": (9, struct.pack("<IQ", 8, 0)), "c": (7, b"\1")}, {}, (TEMPLATE, "chatml")),
    ({**MODEL, "tokenizer.chat_template": "<start_of_turn>"}, {}, ("<start_of_turn>", "gemma")),
    ({**MODEL, "tokenizer.chat_template": "[INST]"}, {}, ("[INST]", "mistral")),
    ({**MODEL, "tokenizer.chat_template": "[INST]<<SYS>>"}, {}, ("[INST]<<SYS>>", "")),
    ({"tokenizer.chat_template": "<|start_header_id|>"}, {}, ("<|start_header_id|>", "llama3")),
])
def test_a_model_file_tells_its_template(tmp_path, pairs, how, told):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(pairs, **how) + b"\0" * 1000)
    assert mm.template_of(str(path)) == told


@pytest.mark.parametrize("content, token", [
    (b"", "GGUF"), (b"PK\3\4" * 9, "GGUF"), (b"GGUF", "no chat template"), (gguf(MODEL, order=">"), "little-endian"),
    (gguf(MODEL)[:60], "no chat template"), (gguf({"a": (8, b"\xff" * 8)}), "no chat template"), (gguf({"general.name": "x"}), "no chat template"),
    (gguf({"tokenizer.chat_template": 5}), "no chat template"), (gguf({"split.no": 1}), "first file"),
])
def test_a_file_that_tells_no_template_is_one_line(tmp_path, content, token):
    (tmp_path / "model.gguf").write_bytes(content)
    raised = fault(mm.template_of, str(tmp_path / "model.gguf"))
    assert raised.kind == "config" and "model.gguf" in raised.message and token in raised.message and "\n" not in raised.message


def test_no_more_of_a_model_file_is_read_than_its_header(tmp_path):
    (tmp_path / "model.gguf").write_bytes(gguf({**MODEL, "a": (9, struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20))}))
    os.truncate(tmp_path / "model.gguf", 1 << 40)  # a terabyte, most of it not there
    assert mm.template_of(str(tmp_path / "model.gguf"))[1] == "chatml"
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", ".", "none"):
        assert fault(mm.template_of, str(tmp_path / path)).kind == "config"


def test_the_template_is_printed_alone_and_its_format_beside_it(run_mm, tmp_path):
    (tmp_path / "model.gguf").write_bytes(gguf({**MODEL, "tokenizer.chat_template": TEMPLATE + "<think>\n"}))
    result = run_mm("--template-of", "model.gguf")
    assert (result.code, result.out) == (0, TEMPLATE + "<think>\n")
    assert all(word in result.err for word in ("chatml", "thinkTags"))
    result = run_mm("--template-of", "mm.yaml")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


def test_a_raw_provider_of_the_config_says_what_it_does_not_do(serve, run_mm, tmp_path):
    server = serve(stream(raw_chunk("ok", "stop")))
    (tmp_path / "c.yaml").write_text(f"providers: {{box: {{url: '{server.url}', protocol: completions, model: m}}}}")
    result = run_mm("--config", "c.yaml", "-p", "box", "-t", "read_file", "hi")
    assert result.out == "ok\n" and "chatml" in result.err and "tools" in result.err
    assert server.arrived().path == "/v1/completions"
    (tmp_path / "c.yaml").write_text(f"providers: {{box: {{url: '{server.url}', protocol: completions, template: gemma, model: m}}}}")
    assert run_mm("--config", "c.yaml", "-p", "box", "--no-think", "hi").err == ""


# ======================================================================================================================
# 8. Tools
# ======================================================================================================================

@pytest.fixture
def tree(tmp_path, box):
    """Files within and without the working directory `in`."""
    inside = tmp_path / "in"
    (inside / "sub").mkdir()
    (tmp_path / "in-other").mkdir()
    for path in ("in/a.txt", "in/sub/b.txt", "outside.txt", "in-other/x.txt"):
        (tmp_path / path).write_text(f"text of {path}\n")
    for link, target in {"out": "../outside.txt", "outdir": "..", "inner": "a.txt"}.items():
        (inside / link).symlink_to(target)
    return inside


@pytest.mark.parametrize("name, path, free, found", [
    ("read_file", "a.txt", True, "in/a.txt"), ("read_file", "sub/../a.txt", True, "in/a.txt"), ("read_file", "./sub/b.txt", True, "in/sub/b.txt"),
    ("read_file", "{in}/a.txt", True, "in/a.txt"), ("read_file", "../in/a.txt", True, "in/a.txt"), ("read_file", "inner", True, "in/a.txt"),
    ("read_file", "outdir/in/a.txt", True, "in/a.txt"), ("read_file", "../outside.txt", False, "of outside"), ("read_file", "out", False, "of outside"),
    ("read_file", "outdir/outside.txt", False, "of outside"), ("read_file", "~/outside.txt", False, "of outside"),
    ("read_file", "sub/../../outside.txt", False, "of outside"), ("read_file", "../in-other/x.txt", False, "in-other"),
    ("list_files", "", True, "a.txt"), ("list_files", "sub", True, "b.txt"), ("list_files", ".", True, "sub/"), ("list_files", "..", False, "outside.txt"),
    ("list_files", "outdir", False, "outside.txt"), ("list_files", "~", False, "in-other/"), ("list_files", "/", False, "tmp/"),
])
def test_reading_below_the_working_directory_is_free_and_anything_else_asks(box, tree, name, path, free, found):
    arguments = {"path": path.replace("{in}", str(tree))} if path else {}
    alone, asked, refused = box(), box("y"), box("n")
    assert use(asked, name, **arguments)[0] and found in use(asked, name, **arguments)[1]
    assert len(asked.asked) == (0 if free else 2)
    for other in (alone, refused):
        ok, output = use(other, name, **arguments)
        assert ok == free and (found in output) == free and (free or output.count("\n") == 0)


@pytest.mark.parametrize("name, arguments", [
    ("read_file", {"path": "sub"}), ("read_file", {"path": "missing"}), ("read_file", {"path": "a\0b"}), ("read_file", {"path": "pipe"}),
    ("read_file", {"path": "/dev/zero"}), ("read_file", {"path": "binary"}), ("read_file", {"path": "binary-end"}), ("read_file", {"path": "a" * 5000}),
    ("read_file", {"path": "loop"}), ("read_file", {"path": "x\ud800"}), ("read_file", {"path": 5}), ("read_file", {"path": None}), ("read_file", {}),
    ("read_file", {"path": ""}), ("list_files", {"path": "a.txt"}), ("list_files", {"path": "missing"}), ("list_files", {"path": "a\0b"}),
    ("list_files", {"path": ["sub"]}), ("write_file", {"path": "sub", "content": "x"}), ("write_file", {"path": "pipe", "content": "x"}),
    ("write_file", {"path": "/dev/zero", "content": "x"}), ("write_file", {"path": "a.txt/b", "content": "x"}), ("write_file", {"path": "a.txt"}),
    ("write_file", {"path": "a\0b", "content": "x"}), ("write_file", {"path": "a.txt", "content": {"x": 1}}), ("run_command", {}),
    ("run_command", {"command": ["ls"]}), ("run_command", {"command": "ls \0"}), ("nowhere", {"path": "a.txt"}), ("", {}),
])
def test_what_cannot_be_done_is_one_clear_line_for_the_model(box, tree, name, arguments):
    os.mkfifo(tree / "pipe")
    (tree / "binary").write_bytes(b"\x7fELF\0\1\2")
    (tree / "binary-end").write_bytes(b"x" * 100000 + b"\0")
    (tree / "loop").symlink_to("loop")
    ok, output = use(box("y"), name, **arguments)
    assert not ok and output.strip() and "\n" not in output and len(output) < 6000
    assert (tree / "a.txt").read_text() == "text of in/a.txt\n"


LONG = "".join(f"{number:06} é\n" for number in range(20000))


@pytest.mark.parametrize("name, arguments", [("read_file", {"path": "long"}), ("run_command", {"command": "cat long"}), ("run_command", {"command": "cat long >&2"})])
@pytest.mark.parametrize("size", [16000, 17000, 33000, len(LONG.encode())])
def test_a_result_of_more_than_16_kib_is_cut_in_the_middle_and_says_how_much_is_missing(box, tmp_path, name, arguments, size):
    raw = LONG.encode()[:size // 10 * 10 - 1]
    (tmp_path / "in/long").write_bytes(raw)
    ok, output = use(box("y"), name, **arguments)
    output = output.replace("\n[exit status 0]", "")
    gaps = re.findall(r"\n\[… ([\d,]+) bytes left out …\]\n", output)
    kept = len(re.sub(r"\n\[… [\d,]+ bytes left out …\]\n", "", output).encode())
    assert ok and output.startswith("000000 é\n") and output.endswith(raw[-9:].decode()) and "\ufffd" not in output
    assert len(gaps) == (size > 16 << 10) and len(output.encode()) <= (16 << 10) + 300
    assert abs(kept + sum(int(gap.replace(",", "")) for gap in gaps) - len(raw)) <= 20  # the exit status, characters not torn


def test_a_list_of_files_is_sorted_marks_folders_and_survives_odd_names(box, tree):
    (tree / os.fsdecode(b"caf\xe9")).write_text("")
    output = use(box(), "list_files")[1]
    assert output.split("\n") == ["a.txt", "caf\ufffd", "inner", "out", "outdir/", "sub/"]
    assert use(box(), "list_files", path="sub/..")[1] == output


@pytest.mark.parametrize("path, content", [("new.txt", "a\r\nb é 🎉"), ("deep/er/new.txt", "x"), ("empty", ""), ("half", "a\udc80b"), ("a.txt", "changed"), ("inner", "changed")])
def test_a_file_is_written_as_it_is_with_its_folders(box, tree, path, content):
    ok, output = use(box("y"), "write_file", path=path, content=content)
    assert ok and "\n" not in output
    assert (tree / path).read_bytes() == content.encode("utf-8", "replace").replace(b"?", "\ufffd".encode())
    assert not [name for _, _, names in os.walk(tree) for name in names if name.startswith(".")]
    assert (tree / "inner").is_symlink() and ((tree / "a.txt").read_text() == "changed") == (content == "changed")


@pytest.mark.parametrize("mode", [0o755, 0o600, 0o444, None])
def test_a_file_keeps_its_mode_and_a_new_one_has_the_usual(box, tree, mode):
    before = os.umask(0o027)
    try:
        if mode:
            (tree / "f").write_text("old")
            (tree / "f").chmod(mode)
        assert use(box("y"), "write_file", path="f", content="new")[0]
    finally:
        os.umask(before)
    assert stat.S_IMODE((tree / "f").stat().st_mode) == (mode or 0o640)


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(box, tree):
    before = sorted(os.listdir(tree))
    with full_disk(1000):
        ok, output = use(box("y"), "write_file", path="a.txt", content="x" * 5000)
    assert not ok and "\n" not in output and sorted(os.listdir(tree)) == before
    assert (tree / "a.txt").read_text() == "text of in/a.txt\n"


@pytest.mark.parametrize("line, tokens", [
    ("echo out; echo err >&2; exit 3", ["out\nerr\n", "exit status 3"]), ("cat; echo read nothing", ["read nothing", "status 0"]),
    ("read x || echo no input", ["no input"]), ("pwd -P", ["/in\n"]), ("printf 'a\\000b'", ["a\ufffdb"]),
    ("printf '\\377ok'", ["\ufffdok"]), ("exec >&- 2>&-; sleep 0.1; exit 4", ["exit status 4"]), ("sleep 3 & echo started", ["started", "exit status 0"]),
    ("(n=0; while [ $n -lt 200 ]; do echo y; sleep 0.02; n=$((n+1)); done) & echo started", ["started", "exit status 0"]),
    ("true", ["exit status 0"]), ("exit 137", ["exit status 137"]), ("no-such-program", ["not found", "exit status 127"]), ("test -t 0 || test -t 1 || tty", ["not a tty"]),
])
def test_a_command_gives_its_output_and_exit_status_and_gets_no_input(box, line, tokens):
    started = time.monotonic()
    ok, output = use(box("y"), "run_command", command=line)
    assert ok and all(token in output for token in tokens) and time.monotonic() - started < 2, output


@pytest.mark.parametrize("line, status", [("echo x; kill -9 $$", -9), ("echo x; kill -TERM $$", -15), ("echo x; exec python3 -c 'import os; os.abort()'", -6)])
def test_a_command_that_a_signal_ended_has_failed(box, line, status):
    ok, output = use(box("y"), "run_command", command=line)
    assert not ok and output.endswith(f"x\n[exit status {status}]")


def test_output_of_the_last_moment_is_not_lost(box, monkeypatch):
    """The command writes and ends between a look at its output and the look whether it still runs."""
    real, looks = select.select, []

    def late(*args):
        if not looks:
            looks.append(time.sleep(0.3))
            return [], [], []
        return real(*args)
    tools = box("y")
    monkeypatch.setattr(select, "select", late)
    assert "late" in result_of(tools.run({"id": "a", "name": "run_command", "arguments": {"command": "sleep 0.1; echo late"}, "raw": ""}))[1]


@pytest.mark.parametrize("by", ["its time limit", "the user"])
@pytest.mark.parametrize("line, talkers", [
    ("(echo x; sleep 30) >f", 1), ("(echo x; sleep 30 & (sleep 30 & echo x; sleep 30) & wait) >f; true", 2),
    ("(trap '' TERM INT HUP PIPE; echo x; sleep 30) >f", 1), ("exec >&- 2>&-; (echo x; sleep 30) >f", 1),
], ids=["a child", "grandchildren", "ignoring signals", "silent"])
def test_a_command_is_ended_with_all_its_processes_by(box, line, talkers, by):
    os.mkfifo("f")
    tools, said = box("y", seconds=0.5 if by == "its time limit" else 0), b""
    reader = os.open("f", os.O_RDONLY | os.O_NONBLOCK)
    box_done = []
    thread = threading.Thread(target=lambda: box_done.append(use(tools, "run_command", command=line)))
    thread.start()
    deadline = time.monotonic() + 5
    while True:  # the pipe ends when the last process that holds it does
        try:
            piece = os.read(reader, 99)
        except BlockingIOError:
            piece = None
        said += piece or b""
        if said.count(b"x") == talkers:
            tools.stopped = by == "the user"
        if piece == b"" and said.count(b"x") == talkers and box_done:
            break
        assert time.monotonic() < deadline, "a process goes on"
        time.sleep(0.01)
    thread.join()
    os.close(reader)
    assert "ended" in box_done[0][1]


@pytest.mark.parametrize("line", ["yes", "cat /dev/zero", "yes >&2"])
def test_endless_output_is_ended(box, monkeypatch, line):
    monkeypatch.setattr(mm, "MOST_TEXT", 1 << 20)
    output = use(box("y"), "run_command", command=line)[1]
    assert "ended after 1 MiB" in output and len(output) < 17000


COMMAND = """commands:
  show:
    description: shows
    parameters: {properties: {a: {type: string}, n: {type: integer}, more: {}}, required: [a]}
    command: [printf, '<%s>', '{a}', '{n}', 'x={more}', '{ a }', '{}']
  gone: {command: [no-such-program-anywhere]}
  env: {command: [env]}
"""


@pytest.mark.parametrize("name, arguments, output", [
    ("show", {"a": "x; echo $HOME `id` $(id) * 'q' \"r\" \\"}, "<x; echo $HOME `id` $(id) * 'q' \"r\" \\><x=><{ a }><{}>"),
    ("show", {"a": "", "n": 5, "more": [1, "é"]}, '<><5><x=[1, "é"]><{ a }><{}>'), ("show", {"a": "{n}", "n": 7}, "<{n}><7><x=><{ a }><{}>"),
    ("show", {"a": "a b\nc", "n": None, "extra": 1}, "<a b\nc><x=><{ a }><{}>"),
    ("show", {"n": 5}, None), ("show", {"a": None}, None), ("show", {"a": "x\0y"}, None), ("show", {"a": "\ud800"}, None), ("gone", {}, None),
])
def test_a_command_of_the_config_runs_without_a_shell_with_its_places_filled(load, box, name, arguments, output):
    settings = load(COMMAND)
    tools = box("y", mm.check_commands(settings["commands"], "commands"))
    ok, said = use(tools, name, **arguments)
    assert (ok, said) == (True, output + "\n[exit status 0]") if output else not ok and "\n" not in said, said


def test_the_words_of_a_command_are_what_was_written(load, box):
    settings = load("commands: {plain: {command: [printf, '%s|', 5, 1e3, yes, 0x1F, '007']}}")
    assert use(box("y", mm.check_commands(settings["commands"], "commands")), "plain") == (True, "5|1e3|yes|0x1F|007|\n[exit status 0]")


@pytest.mark.parametrize("content, tokens", [
    ("look: date", ["look"]), ("look: {description: x}", ["look", "command"]), ("look: {command: date}", ["look", "command"]),
    ("look: {command: []}", ["look", "command"]), ("look: {command: [[a]]}", ["look", "command"]), ("look: {command: [a], parameters: [q]}", ["look", "parameters"]),
    ("look: {command: [a], parameters: {properties: [q]}}", ["look", "parameters"]),
    ("look: {command: [a], parameters: {properties: {q: string}}}", ["look", "parameters"]),
    ("look: {command: [a], parameters: {properties: {q: {}}, required: other}}", ["look", "required"]),
    ("look: {command: [a], parameters: {properties: {q: {}}, required: [r]}}", ["look", "required"]),
    ("look: {command: [a], parameters: {properties: {q: {}}, required: [[q]]}}", ["look", "required"]),
    ("look: {command: [a, '{zzz}']}", ["look", "zzz"]), ("look up: {command: [a]}", ["look up"]), ("read_file: {command: [a]}", ["read_file"]),
    ("x" * 65 + ": {command: [a]}", ["letters"]),
])
def test_a_config_tool_that_cannot_work_is_named_at_load(load, content, tokens):
    settings = load("commands:\n  " + content + "\n  fine: {command: [date]}")
    raised = fault(mm.check_commands, settings["commands"], settings.source("commands"))
    assert raised.kind == "config" and "\n" not in raised.message
    assert all(token in raised.message for token in ["box.yaml", "commands", *tokens]), raised.message


def test_every_bad_tool_is_told_at_once_before_anything_is_asked(serve, run_mm, tmp_path):
    server = serve(stream(OK))
    (tmp_path / "c.yaml").write_text("commands: {look: {command: date}, read_file: {command: [a]}}\n")
    result = run_mm("--config", "c.yaml", *at(server), "hi")
    assert (result.code, result.out, result.err.count("\n"), server.posts) == (2, "", 2, [])
    result = run_mm(*at(server), "-t", "read_file,zzz", "hi")
    assert (result.code, result.err.count("\n"), server.posts) == (2, 1, []) and "zzz" in result.err and "list_files" in result.err


def test_a_command_does_not_see_the_keys(serve, run_mm, tmp_path):
    (tmp_path / "c.yaml").write_text(COMMAND + "providers: {other: {url: u, apiKeyEnv: MY_SECRET}}\n")
    server = serve(calls("run_command", command="env"), calls("env"), stream(OK))
    keys = {"MM_API_KEY": "hidden-1", "OPENAI_API_KEY": "hidden-2", "MY_SECRET": "hidden-3", "ELSE_API_KEY": "hidden-4", "HARMLESS": "seen"}
    assert run_mm("--config", "c.yaml", *at(server), "-y", "-t", "all", "hi", env=keys).code == 0
    results = [message["content"] for message in server.arrived(3).body["messages"] if message["role"] == "tool"]
    assert len(results) == 2 and all("HARMLESS=seen" in result and "PATH=" in result and "hidden" not in result for result in results)


@pytest.mark.parametrize("keys, ran", [("y\r", True), ("yes\r", True), ("n\r", False), ("\rwhat?\ry\r", True), ("a\r", True), ("\x04", False)])
def test_a_person_is_asked_before_a_command_runs(serve, terminal, tmp_path, keys, ran):
    server = serve(calls("run_command", command="echo ran > proof; echo done"), stream(OK))
    screen = terminal(*at(server), "-t", "run_command", "hi")
    screen.expect("echo ran > proof")
    screen.expect("y / n / a")
    assert not (tmp_path / "proof").exists()
    screen.send(keys)
    screen.expect("ok")
    assert screen.code() == 0 and (tmp_path / "proof").exists() == ran and "Traceback" not in screen.shown
    result = strict(server.arrived(2))[-1]["content"]
    assert ("done" in result) == ran and (ran or "refused" in result)


def test_ctrl_c_at_the_question_runs_nothing_and_the_prompt_comes_back(serve, terminal, tmp_path):
    server = serve(calls("run_command", command="echo ran > proof"), stream(OK))
    screen = terminal(*at(server), "-t", "run_command")
    screen.prompt()
    screen.send("one\r")
    screen.expect("y / n / a")
    screen.take(0.3)  # see prompt()
    screen.send("\x03")
    screen.prompt()
    screen.send("two\r")
    screen.expect("ok")
    assert not (tmp_path / "proof").exists() and "one" in str(strict(server.arrived(2)))


def test_always_is_for_this_tool_alone_and_for_the_whole_session(serve, terminal, tmp_path):
    server = serve(calls("run_command", command="echo 1 >> log"), calls("run_command", command="echo 2 >> log"), stream(OK),
                   calls("run_command", command="echo 3 >> log"), calls("write_file", path="log2", content="x\n"), stream(chunk("fine") + STOP))
    screen = terminal(*at(server), "-t", "all")
    screen.prompt()
    screen.send("one\r")
    screen.expect("y / n / a")
    screen.send("a\r")
    assert "y / n / a" not in screen.expect("ok")
    assert "2 tool calls" in screen.expect("> ")
    screen.send("two\r")
    asked = screen.expect("y / n / a")
    assert "write log2" in asked and "+x" in asked
    assert (tmp_path / "log").read_text() == "1\n2\n3\n"
    screen.send("n\r")
    screen.expect("fine")
    assert not (tmp_path / "log2").exists() and "refused" in strict(server.arrived(6))[-1]["content"]


def test_the_question_for_permission_is_no_part_of_a_piped_answer(serve, terminal, tmp_path):
    server = serve(calls("run_command", command="echo done"), stream(OK))
    screen = terminal(*at(server), "-t", "run_command", "hi", redirect='<"$TTY" >out 2>"$TTY"')
    screen.expect("echo done")
    screen.take(0.2)
    screen.send("y\r")
    assert screen.code() == 0 and (tmp_path / "out").read_text() == "ok\n"
    assert "y / n / a" in screen.shown and "done" in strict(server.arrived(2))[-1]["content"]


@pytest.mark.parametrize("options, stdin, ran", [([], None, False), ([], "piped", False), (["--json"], None, False), (["-y"], None, True), (["--yes", "--json"], "piped", True)])
def test_without_a_terminal_a_command_is_refused_unless_yes_was_said(serve, run_mm, tmp_path, options, stdin, ran):
    server = serve(calls("run_command", command="echo ran > proof"), stream(OK))
    result = run_mm(*at(server), "-t", "run_command", *options, "hi", stdin=stdin)
    assert result.code == 0 and (tmp_path / "proof").exists() == ran
    assert strict(server.arrived(2))[-1]["content"].startswith("run_command was not run") == (not ran)
    if result.events:
        named, ended = result.events[:2]
        assert list(named) == ["type", *mm.EVENTS["tool_call"]] and list(ended) == ["type", *mm.EVENTS["tool_result"]]
        assert (named["name"], named["arguments"], ended["id"], ended["ok"]) == ("run_command", {"command": "echo ran > proof"}, "a", ran)


def test_a_person_sees_what_a_call_does_its_result_in_a_few_lines_and_what_changes_in_a_file(serve, terminal, tmp_path):
    (tmp_path / "poem").write_text("roses\nviolets\n")
    server = serve(calls("write_file", path="poem", content="roses\nlilies\n"), calls("run_command", command="seq 1000; printf '\\033]0;x\\007'"), stream(OK))
    screen = terminal(*at(server), "-y", "-t", "all", "hi")
    screen.expect("ok")
    assert screen.code() == 0
    rows = plain(screen.shown).split("\r\n")
    assert [row.strip() for row in rows if row.strip() in ("-violets", "+lilies", "roses")] == ["roses", "-violets", "+lilies"]
    assert sum("seq 1000" in row for row in rows) == 1 and len(rows) < 25 and "\x1b]" not in screen.shown and "1\r\n  2" in plain(screen.shown)


def test_tools_are_sorted_whatever_the_order_and_a_conversation_s_requests_share_all_that_is_not_new(load, serve, box):
    prefixes = set()
    for names, order in (("[write_file, zz, list_files, aa]", "zz: {command: [date]}, aa: {command: [date]}"),
                         ("[aa, list_files, write_file, zz]", "aa: {command: [date]}, zz: {command: [date]}")):
        settings = load(f"tools: {names}\ncommands: {{{order}}}\nsystem: be kind")
        server = serve(calls("aa"), stream(chunk(reasoning="hm") + OK), calls("list_files"), stream(OK))
        tools = box("y", mm.check_commands(settings["commands"], ""))
        tools.names = settings["tools"]
        conversation, bodies = mm.Conversation(backend_of("llamacpp", server.url), settings, tools), []
        post = conversation.protocol.stream
        conversation.protocol.stream = lambda body, *rest: bodies.append(body) or post(body, *rest)  # noqa: B023
        ask(conversation, "one")
        ask(conversation, "two")
        assert [entry["function"]["name"] for entry in server.posts[0].body["tools"]] == ["aa", "list_files", "write_file", "zz"]
        ends = [body.rindex(b'],"stream":') for body in bodies]
        for first, second, end in zip(bodies, bodies[1:], ends):
            assert second.startswith(first[:end] + b",") and second.endswith(first[end:])
        assert len(bodies) == 4 and json.loads(bodies[3])["messages"][-1]["content"] == "(empty)"
        prefixes.add(re.sub(rb"[0-9]+:[0-9:]+", b"", bodies[0]))
    assert len(prefixes) == 1


@pytest.mark.parametrize("keys, ran", [("yarn test\rn\r", False), ("and then\rn\r", False), ("always\r", True), ("NO\r", False)])
def test_only_a_whole_word_answers_the_question_for_permission(serve, terminal, tmp_path, keys, ran):
    server = serve(calls("run_command", command="echo > proof"), stream(OK))
    screen = terminal(*at(server), "-t", "run_command", "hi")
    screen.expect("y / n / a")
    screen.send(keys)
    screen.expect("ok")
    assert screen.code() == 0 and (tmp_path / "proof").exists() == ran


def test_what_was_typed_before_the_question_is_no_answer_to_it(serve, terminal, tmp_path):
    typed = threading.Event()
    server = serve([*stream(chunk(reasoning="hm"))[:2], typed, call(index=0, id="a", name="run_command", arguments='{"command": "echo > proof"}') + CALLED], stream(OK))
    screen = terminal(*at(server), "-t", "run_command", "hi")
    screen.expect("hm")
    screen.send("y\r")
    typed.set()
    screen.expect("y / n / a")
    assert not (tmp_path / "proof").exists()
    screen.send("n\r")
    screen.expect("ok")
    assert not (tmp_path / "proof").exists()


def test_a_command_of_several_lines_cannot_look_like_another_question(serve, terminal):
    server = serve(calls("run_command", command="rm x\n\U0001f527 run ls\u202e\rz"), stream(OK))
    screen = terminal(*at(server), "-t", "run_command", "hi")
    shown = screen.expect("y / n / a")
    rows = [row for row in shown.replace("\r\n", "\n").split("\n") if "run ls" in row]
    assert rows and all(row.startswith("   │ ") for row in rows) and "\u202e" not in shown and "<202e>" in shown and "␍" in shown
    screen.send("n\r")
    assert screen.code() == 0


def test_where_the_question_could_not_be_seen_nobody_is_asked(serve, terminal, tmp_path):
    server = serve(calls("run_command", command="echo > proof"), stream(OK))
    screen = terminal(*at(server), "-t", "run_command", "hi", redirect='<"$TTY" >"$TTY" 2>err')
    assert screen.code() == 0 and not (tmp_path / "proof").exists() and "nobody" in strict(server.arrived(2))[-1]["content"]


@pytest.mark.parametrize("old, content, shown", [
    (b"a\n", "a\n", ["(no change)"]), (b"a\r\n", "a\n", ["-a\r", "+a"]), (b"a\n", "a", ["-"]), (b"a\n", "b\n", ["-a", "+b"]), (b"x\n" * 5000, "y\n" * 5000, ["-5,001 lines", "+5,001 lines"]),
])
def test_what_a_write_would_change_is_never_shown_as_nothing(box, old, content, shown):
    open("f", "wb").write(old)
    assert set(shown) <= set(box("y").preview({"name": "write_file", "arguments": {"path": "f", "content": content}})[1])


@pytest.mark.parametrize("name, arguments", [("write_file", {"path": "x", "content": []}), ("write_file", {"path": "x", "content": 0}), ("run_command", {"command": {}}),
                                             ("run_command", {"command": False}), ("read_file", {"path": []}), ("list_files", {"path": 0})])
def test_arguments_of_another_type_are_told_also_where_they_are_empty(box, name, arguments):
    ok, output = use(box("y"), name, **arguments)
    assert not ok and "must be text" in output and not os.path.exists("x")


def test_the_values_that_a_schema_allows_are_all_that_a_command_gets(box):
    commands = mm.check_commands({"paint": {"parameters": {"properties": {"c": {"enum": ["red", "blue"]}}}, "command": ["echo", "{c}"]}}, "commands")
    assert use(box("y", commands), "paint", c="red")[0] and use(box("y", commands), "paint", c="green") == (False, "paint: c must be one of ['red', 'blue'].")


@pytest.mark.parametrize("command, token", [
    ({"comand": ["df"]}, "command: ["), ({"command": ["df"], "timeout": 5}, "wants description, command"), ({"command": ["{a}"], "parameters": {"properties": {"a": {}}}}, "command"),
    ({"command": ["df", "{path}"], "parameters": {"path": {"type": "string"}}}, "parameters"),
])
def test_a_command_that_is_misspelt_is_told_at_load(command, token):
    assert token in fault(mm.check_commands, {"look": command}, "commands").message


def test_a_misspelt_tool_is_told_beside_all_as_well(run_mm, serve):
    result = run_mm(*at(serve(stream(OK))), "-t", "all,reed_file", "hi")
    assert result.code == 2 and "did you mean read_file?" in result.err


def test_a_deleted_working_directory_is_no_reason_not_to_answer(serve, start_mm, tmp_path):
    server, gone = serve(calls("run_command", command="echo x"), stream(OK)), tmp_path / "gone"
    gone.mkdir()
    process = subprocess.Popen(["sh", "-c", 'cd "$1" && rmdir "$1" && shift && exec "$@"', "sh", str(gone), sys.executable, os.path.join(HERE, "mm.py"), *at(server), "--no-save", "-y", "-t", "all", "hi"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, b"ok\n") and b"fault" not in err


def test_a_command_ends_with_the_terminal(serve, terminal, tmp_path):
    os.mkfifo(tmp_path / "f")
    server = serve(calls("run_command", command="(echo x; exec sleep 30) > f"), stream(OK))
    screen = terminal(*at(server), "-y", "-t", "run_command", "hi")
    with open(tmp_path / "f", "rb") as pipe:
        assert pipe.read(2) == b"x\n"
        screen.process.send_signal(signal.SIGHUP)
        assert pipe.read() == b""  # ends when the last process that holds it does
    assert screen.code() == 128 + signal.SIGHUP


# ======================================================================================================================
# 9. The conversation
# ======================================================================================================================

def test_a_turn_ends_with_done_and_its_fields_are_in_order(serve):
    end = sse({"choices": [], "usage": USAGE, "timings": {"prompt_n": 3}})
    events = ask(talk(serve(stream(chunk(reasoning="hm") + chunk("o") + chunk("k") + STOP + end))))
    assert kinds(events) == ["reasoning", "answer", "answer", "done"]
    done = events[-1]
    assert list(done) == ["type", *mm.EVENTS["done"]]
    expected = {"finish_reason": "stop", "provider": "server", "model": "m", "usage": USAGE, "timings": {"prompt_n": 3}}
    assert expected.items() <= done.items()
    assert list(done["seconds"]) == ["first_token", "thinking", "answer", "total"]


def test_questions_and_answers_go_back_without_the_thinking(serve):
    server = serve(stream(chunk(reasoning="hm") + OK))
    conversation = talk(server, system="be kind")
    ask(conversation, "one")
    ask(conversation, "two")
    assert server.arrived(2).body["messages"] == [
        {"role": "system", "content": "be kind"}, user("one"), assistant("ok"), user("two")]


def test_a_tool_call_is_told_and_refused_and_the_model_goes_on(serve):
    server = serve(stream(chunk("Let me look. ") + look(index=0, id="a", arguments='{"q":"red"}') + STOP), stream(OK))
    events = ask(talk(server))
    assert kinds(events) == ["answer", "tool_call", "tool_result", "answer", "done"]
    assert events[1] == {"type": "tool_call", "id": "a", "name": "look", "arguments": {"q": "red"}}
    assert not events[2]["ok"] and "look" in events[2]["output"]
    messages = server.arrived(2).body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["content"] == "Let me look. " and messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"] == "a"


@pytest.mark.parametrize("broken", ['{"q": "re', "[1, 2]", '{"q": "a"} {"q"'])
def test_a_call_with_broken_arguments_does_not_poison_the_history(serve, broken):
    server = serve(stream(look(index=0, id="a", arguments=broken) + CALLED), stream(OK))
    conversation = talk(server)
    events = ask(conversation) + ask(conversation, "again")
    assert kinds(events) == ["tool_result", "answer", "done", "answer", "done"] and not events[0]["ok"]
    for post in server.posts[1:]:
        assert post.body["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"
        assert post.body["messages"][2]["role"] == "tool" and post.body["messages"][2]["content"]


def test_a_call_that_the_token_limit_cut_is_not_run(serve):
    server = serve(stream(look(index=0, id="a", arguments="{}") + CUT))
    events = ask(talk(server))
    assert kinds(events) == ["notice", "done"] and "max_tokens" in events[0]["message"] and len(server.posts) == 1


def test_a_turn_of_calls_alone_stops_at_its_limit(serve):
    server = serve(stream(look(index=0, id="a", arguments="{}") + CALLED))
    events = ask(talk(server, maxSteps=3))
    assert error(events)[0] == "steps" and "--max-steps" in error(events)[1] and len(server.posts) == 3


CUTS = {
    "a tidy close": stream(HALF), "a reset": stream(HALF, 0.1, "reset"), "a chunk missing": chunked(HALF)[:-1],
    "a length not reached": [HEAD + b"Content-Length: 999\r\n\r\n" + HALF], "an error event": stream(HALF + sse({"error": "slot lost"})),
    "a chunk of no size": [HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + HALF],
    "headers alone": [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"], "no bytes": [b""], "another protocol": [b"SSH-2.0-X\r\n"],
    "an empty body": reply(200),
}


@pytest.mark.parametrize("script", CUTS.values(), ids=CUTS)
def test_a_stream_that_breaks_is_asked_for_once_more(serve, script):
    server = serve(script, stream(chunk("The whole.") + STOP))
    conversation = talk(server)
    events = ask(conversation)
    assert kinds(events)[-3:] == ["retry", "answer", "done"] and error(events) is None
    assert conversation.history == [user("hi"), assistant("The whole.")]
    assert len(server.posts) == 2 and server.posts[0].body == server.posts[1].body


@pytest.mark.parametrize("script", CUTS.values(), ids=CUTS)
def test_a_stream_that_breaks_twice_ends_the_turn_and_keeps_the_text(serve, script):
    server = serve(script, script, stream(OK))
    conversation = talk(server)
    events = ask(conversation)
    assert error(events)[0] in ("interrupted", "protocol", "server") and "start" not in error(events)[1]
    assert len(server.posts) == 2 and kinds(events)[-1] == "done"
    ask(conversation, "go on")
    roles = server.roles(3)
    assert roles == (["user", "assistant", "user"] if "half" in text(events) else ["user"])


@pytest.mark.parametrize("first, restartable, retries, asked", [
    (stream(HALF), True, 1, 2), (stream(HALF), True, 0, 1), (stream(HALF), True, 3, 4),
    (stream(HALF), False, 1, 1), (stream(chunk(reasoning="half")), False, 1, 2),
    (stream(chunk("whole") + STOP + sse({"error": "late"})), True, 1, 1),
])
def test_how_often_a_broken_stream_is_asked_for(serve, first, restartable, retries, asked):
    server = serve(first)
    assert error(ask(talk(server, restartable=restartable, retries=retries)))
    assert len(server.posts) == asked


@pytest.mark.parametrize("refusal, asked, kind", [
    (reply(503, {"error": {"message": "Loading model"}}, Retry_After=0), 3, None),
    (reply(429, {"error": "slow down"}, Retry_After=0), 2, "rate_limited"),
    (reply(429, {"error": "slow down"}, Retry_After=3600), 1, "rate_limited"), (reply(502, Retry_After=0), 2, "server"),
    (reply(504, Retry_After=0), 2, "server"), (reply(500, {"error": {"message": "compute failed"}}), 1, "server"),
    (reply(400, {"error": "bad temperature"}), 1, "server"), (reply(401), 1, "auth"), (reply(404), 1, "not_found"),
])
def test_a_refusal_is_tried_again_only_where_that_can_help(serve, refusal, asked, kind):
    server = serve(refusal, refusal, stream(OK))
    events = ask(talk(server, "llamacpp"))
    assert (len(server.posts), error(events) and error(events)[0]) == (asked, kind)


def test_a_retry_after_is_waited_for(serve):
    server = serve(reply(429, {"error": "slow down"}, Retry_After=1), stream(OK))
    waited = [event["seconds"] for event in talk(server).ask("hi") if event["type"] == "waiting"]
    assert len(server.posts) == 2 and max(waited) > 0.7


def test_an_answer_that_breaks_after_the_model_was_loaded_is_not_glued_to_the_next(serve):
    events = ask(talk(serve(reply(503, {"error": {"message": "Loading model"}}, Retry_After=0), stream(HALF), stream(OK))))
    assert [event["type"] for event in events if event["type"] in ("retry", "answer")] == ["retry", "answer", "retry", "answer"]


def test_a_model_that_never_finishes_loading_is_given_up_in_time(serve):
    server = serve([0.1, *reply(503, {"error": {"message": "Loading model"}}, Retry_After=0)])
    events = ask(talk(server, firstTokenTimeout=0.4))
    assert "Loading model" in error(events)[1] and kinds(events).count("retry") == 1 and len(server.posts) > 2


@pytest.mark.parametrize("refusal", [
    reply(400, {"object": "error", "message": "unknown field: stream_options", "code": 400}),
    reply(422, {"detail": [{"loc": ["body", "stream_options"], "msg": "not permitted"}]}),
])
def test_an_optional_field_that_is_refused_is_left_out_from_then_on(serve, refusal):
    server = serve(refusal, stream(OK))
    conversation = talk(server, "vllm")
    assert text(ask(conversation) + ask(conversation)) == "okok"
    assert ["stream_options" in post.body for post in server.posts] == [True, False, False]


def test_several_optional_fields_can_be_refused_one_after_the_other(serve):
    refusals = [reply(400, {"error": f"unknown field: {name}"}) for name in ("stream_options", "return_progress")]
    server = serve(*refusals, stream(OK))
    assert text(ask(talk(server, "llamacpp"))) == "ok"
    assert not {"stream_options", "return_progress"} & set(server.arrived(3).body)


def test_a_think_switch_that_is_refused_is_left_out_and_told(serve):
    server = serve(reply(400, {"error": {"message": '"m" does not support thinking'}}), stream(OK))
    events = ask(talk(server, "ollama", think=True))
    assert kinds(events) == ["notice", "answer", "done"] and "reasoning_effort" in events[0]["message"]
    assert ["reasoning_effort" in post.body for post in server.posts] == [True, False]


@pytest.mark.parametrize("body, kind, tokens", [
    (chunk(reasoning="a") + chunk(reasoning="b") + CUT, "notice", ["2 tokens", "max_tokens", "--no-think"]),
    (chunk(reasoning="a") + CUT + usage(completion_tokens_details={"reasoning_tokens": 1812}), "notice", ["1,812 tokens"]),
    (CUT, "notice", ["max_tokens"]), (chunk(reasoning="a") + STOP, "error", ["1 token", "--no-think"]),
    (chunk(" \n") + STOP, "error", ["no answer"]), (STOP, "error", ["no answer"]),
    (OK.replace(b'"stop"', b'"length"'), "notice", ["cut", "max_tokens"]),
    (OK.replace(b'"stop"', b'"content_filter"'), "notice", ["cut", "filter"]),
])
def test_an_empty_or_cut_answer_is_explained(serve, body, kind, tokens):
    server = serve(stream(body), stream(OK))
    conversation = talk(server)
    said = [event for event in ask(conversation) if event["type"] in ("notice", "error")]
    assert [event["type"] for event in said] == [kind] and all(token in said[0]["message"] for token in tokens), said
    ask(conversation, "again")
    assert server.roles(2) == (["user"] if b'"ok"' not in body else ["user", "assistant", "user"])


def test_a_prompt_that_the_server_cut_without_a_word_is_noticed(serve):
    server = serve(stream(chunk("ok") + STOP + usage(prompt_tokens=150) + DONE))
    conversation = talk(server)
    assert kinds(ask(conversation, "word " * 200)) == ["answer", "done"]
    notice = ask(conversation, "word " * 9000)[-2]
    assert notice["type"] == "notice" and "150" in notice["message"]


def test_what_broke_off_stays_and_roles_alternate_after_it(serve):
    server = serve(reply(500, {"error": "no"}), stream(chunk(reasoning="hm") + chunk("Point 1.")), stream(OK))
    conversation = talk(server, retries=0)
    for question in ("one", "two", "three"):
        ask(conversation, question)
    assert server.arrived(3).body["messages"] == [user("two"), assistant("Point 1."), user("three")]


def test_two_conversations_at_once_do_not_mix(serve):
    first, second = threading.Event(), threading.Event()
    scripts = stream(chunk("a"), first, chunk("a") + STOP), stream(chunk("b"), second, chunk("b") + STOP)
    turns = [talk(serve(script)).ask("hi") for script in scripts]
    for turn in turns:
        while next(turn)["type"] != "answer":
            pass
    second.set()
    first.set()
    assert [text(turn) for turn in turns] == ["a", "b"]


REFUSED = reply(400, {"error": "no"})
SECOND = dict(index=1, id="b", name="list_files", arguments='{"path": "."}')
BREAKS = {  # name: (scripts of the first turn, how many calls ran, the error's kind)
    "a call that is broken": ([stream(call(**{**LIST, "arguments": '{"path": "x'}) + CALLED), stream(OK)], 0, None),
    "arguments that are a list": ([stream(call(**{**LIST, "arguments": '["."]'}) + CALLED), stream(OK)], 0, None),
    "arguments that are an object": ([stream(call(**{**LIST, "arguments": {"path": "."}}) + CALLED), stream(OK)], 1, None),
    "no arguments": ([stream(call(index=0, id="a", name="list_files") + CALLED), stream(OK)], 1, None),
    "a call cut by the token limit": ([stream(call(**{**LIST, "arguments": '{"path'}) + chunk(finish="length") + DONE)], 0, None),
    "a whole call at the token limit": ([stream(chunk("Look: ") + call(**LIST) + chunk(finish="length") + DONE)], 0, None),
    "two calls, one broken": ([stream(call(**LIST) + call(**{**SECOND, "arguments": "{"}) + CALLED), stream(OK)], 1, None),
    "two calls without ids": ([stream(call(**{**LIST, "id": None}) + call(**{**SECOND, "id": ""}) + CALLED), stream(OK)], 2, None),
    "two calls with one id": ([stream(call(**LIST) + call(**{**SECOND, "id": "a"}) + CALLED), stream(OK)], 2, None),
    "one id again and again": ([stream(call(**LIST) + CALLED), stream(call(**LIST) + CALLED), stream(OK)], 2, None),
    "a call without a name": ([stream(call(index=0, id="a", arguments="{}") + CALLED), stream(OK)], 0, None),
    "a call of an unknown tool": ([stream(call(**{**LIST, "name": "fs.look up"}) + CALLED), stream(OK)], 0, None),
    "a call that finishes with stop": ([stream(call(**LIST) + STOP + DONE), stream(OK)], 1, None),
    "a call with no finish_reason": ([stream(call(**LIST) + DONE), stream(OK)], 1, None),
    "text and a call": ([stream(chunk("Look: ") + call(**LIST) + CALLED), stream(OK)], 1, None),
    "a call and an empty answer": ([stream(call(**LIST) + CALLED), stream(STOP + DONE)], 1, "empty"),
    "thinking alone": ([stream(chunk(reasoning="hm") + STOP + DONE)], 0, "empty"),
    "a blank answer": ([stream(chunk(" \n") + STOP + DONE)], 0, "empty"),
    "a refusal": ([REFUSED], 0, "server"),
    "a refusal after a call": ([stream(call(**LIST) + CALLED), reply(500, {"error": "roles must alternate"})], 1, "server"),
    "a cut in thinking": ([stream(chunk(reasoning="hm"))] * 2, 0, "interrupted"),
    "a cut in the answer": ([stream(chunk("half"))] * 2, 0, "interrupted"),
    "a cut in a call": ([stream(chunk("half") + call(**{**LIST, "arguments": '{"pa'}))] * 2, 0, "interrupted"),
    "a cut after a whole call": ([stream(call(**LIST))] * 2, 0, "interrupted"),
    "an error after a call ran": ([stream(call(**LIST) + CALLED), *[stream(chunk("half") + sse({"error": {"message": "slot lost"}}))] * 2], 1, "server"),
    "a stall after a call ran": ([stream(call(**LIST) + CALLED), stream(chunk("half"), "hang")], 1, "stalled"),
    "too many steps": ([stream(call(**LIST) + CALLED)] * 3, 3, "steps"),
    "a lone surrogate": ([stream(chunk("a\ud800") + call(**{**LIST, "arguments": '{"path": "\\ud800"}'}) + CALLED), stream(OK)], 0, None),
}


@pytest.mark.parametrize("scripts, ran, kind", BREAKS.values(), ids=BREAKS)
def test_the_next_request_is_strict_and_nothing_is_lost_after(serve, box, scripts, ran, kind):
    server = serve(*scripts, stream(chunk("fine") + STOP))
    conversation = agent(server, box(), system="be kind", maxSteps=3, watchdogTimeout=0.5)
    events = ask(conversation, "the question")
    assert (error(events) and error(events)[0], len(server.posts)) == (kind, len(scripts))
    results = [event for event in events if event["type"] == "tool_result"]
    assert sum(event["ok"] for event in results) == ran and kinds(events)[-1] == "done"
    assert text(ask(conversation, "the next")) == "fine"
    messages = [strict(post) for post in server.posts][-1]
    said = json.dumps(messages, ensure_ascii=False)
    assert ("the question" in said) == (scripts[0] != REFUSED) and "the next" in said and messages[0]["content"] == "be kind"
    assert len([message for message in messages if message["role"] == "tool"]) == len(results)
    assert ("half" in said) == ("half" in text(events)) and "hm" not in said
    for event in results:
        assert any(message["content"] == event["output"] and message["role"] == "tool" for message in messages)


@pytest.mark.parametrize("script, when, kept", [
    (["hang"], "posted", []), (stream(chunk(reasoning="hm"), "hang"), "reasoning", []), (stream(chunk("half"), "hang"), "answer", ["half"]),
    (stream(chunk("half") + call(**{**LIST, "arguments": '{"pa'}), "hang"), "call", ["half"]),
    (calls("run_command", command="echo out; echo x > f; sleep 30"), "tool", ["out", "ended"]),
    (stream(call(**LIST) + call(index=1, id="b", name="run_command", arguments='{"command": "ls"}') + CALLED), "asking", ["(empty)"]),
], ids=["waiting", "thinking", "answering", "calling", "in a tool", "between a call and its result"])
def test_ctrl_c_loses_nothing_while(serve, box, script, when, kept):
    server = serve(script, stream(OK))
    tools = box("y")
    if when == "tool":
        os.mkfifo("f")
    conversation = agent(server, tools)
    if when == "asking":
        def permit(*what):
            if not conversation.interrupt():
                raise KeyboardInterrupt  # as the handler does
        tools.permit = permit
    if when in ("posted", "tool"):  # from another thread, as nothing comes here
        threading.Thread(target=lambda: (open("f").read() if when == "tool" else server.arrived()) and conversation.interrupt(), daemon=True).start()
    out, started = mm.Pen(io.StringIO()), time.monotonic()

    def turn():
        for event in conversation.ask("the question"):
            yield event
            if event["type"] == when or when == "call" and conversation.replies and conversation.replies[-1].calls.calls and not conversation.stopped:
                conversation.interrupt()
    assert mm.run_turn(conversation, turn(), mm.Ndjson(out)) == 130 and time.monotonic() - started < 5
    events = [json.loads(line) for line in out.stream.getvalue().splitlines()]
    assert error(events)[0] == "cancelled" and kinds(events)[-1] == "done"
    assert text(ask(conversation, "the next")) == "ok"
    said = json.dumps(strict(server.arrived(2)))
    assert all(word in said for word in ["the question", "the next", *kept]) and "hm" not in said


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_broken_stream_is_asked_for_again_and_tools_are_not_run_again(serve, box, cut):
    server = serve(calls("run_command", command="echo x >> log"), cut, calls("run_command", "b", command="echo y >> log"), stream(OK))
    conversation = agent(server, box("y"))
    events = ask(conversation)
    assert error(events) is None and kinds(events).count("retry") == 1 and open("log").read() == "x\ny\n"
    assert server.posts[1].body == server.posts[2].body and len(server.posts) == 4
    assert "half" not in str(strict(server.posts[3]))


@pytest.mark.parametrize("option, steps", [([], 25), (["--max-steps", "2"], 2)])
def test_a_loop_of_calls_ends_with_a_line_and_exit_code_1(serve, run_mm, option, steps):
    server = serve(calls("list_files"))
    result = run_mm(*at(server), "-t", "list_files", *option, "hi")
    assert (result.code, len(server.posts)) == (1, steps) and "--max-steps" in result.err.splitlines()[-1]


def test_ctrl_c_ends_the_thinking_and_a_second_one_stops_the_answer(serve, terminal):
    ended = threading.Event()
    server = serve(thinking(ended, chunk("The answer"), "hang"), reply(200, {"success": True}), stream(OK))
    screen = terminal("-p", "llamacpp", *at(server))
    screen.prompt()
    screen.send("one\r")
    screen.expect("hm")
    screen.send("\x03")
    control = server.arrived(2)
    assert (control.path, control.body) == ("/v1/chat/completions/control", {"id": "chatcmpl-7", "action": "reasoning_end"})
    ended.set()
    screen.expect("The answer")
    screen.send("\x03")
    screen.prompt()
    screen.send("two\r")
    screen.expect("ok")
    assert server.posts[0].body["reasoning_control"] is True and strict(server.arrived(3)) == [user("one"), assistant("The answer"), user("two")]


def test_a_second_ctrl_c_stops_a_thinking_that_does_not_end(serve, terminal):
    server = serve(thinking("hang"), reply(200, {"success": True}))
    screen = terminal("-p", "llamacpp", *at(server), "hi")
    screen.expect("hm")
    screen.send("\x03")
    server.arrived(2)
    while screen.process.poll() is None:  # the second one counts once the answer to the first is there
        screen.send("\x03")
        screen.take(0.1)
    assert screen.code() == 130 and len(server.posts) == 2, screen.shown


@pytest.mark.parametrize("provider, control", [("llamacpp", reply(404)), ("llamacpp", reply(200, {"success": False})), ("llamacpp", reply(200, b"odd")), ("vllm", None), ("", None)])
def test_where_thinking_cannot_be_ended_ctrl_c_stops(serve, terminal, provider, control):
    server = serve(thinking("hang"), *[control] * bool(control))
    screen = terminal(*["-p", provider] * bool(provider), *at(server), "hi")
    screen.expect("hm")
    screen.send("\x03")
    assert screen.code() == 130 and len(server.posts) == 1 + bool(control) and "Traceback" not in screen.shown


def test_without_a_terminal_ctrl_c_stops_at_once(serve, start_mm):
    server = serve(thinking("hang"))
    process = start_mm("-p", "llamacpp", *at(server), "hi")
    assert process.stderr.read(2) == b"hm"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130 and len(server.posts) == 1


@pytest.mark.parametrize("provider, pages, window", [  # the kinds that test_the_probe_finds_the_context_that_is_served does not have
    ("", {"/v1/models": {"data": [{"id": "m", "meta": {"n_ctx": 1024}}]}}, 1024), ("", {"/v1/models": {"data": [{"id": "m", "max_model_len": 512}]}}, 512),
    ("llamacpp", {"/v1/models": {"data": [{"id": "m", "meta": None}]}, "/props?model=m&autoload=false": {"default_generation_settings": {"n_ctx": 2048}}}, 2048),
    ("dmr", {"/engines/_configure?model=m": [{"Model": "ai/m", "Config": {"context-size": 4096}}], "/engines/v1/models": {"data": [{"id": "ai/m"}]}}, 4096),
    ("lmstudio", {"/api/v1/models": {"models": [{"key": "m", "loaded_instances": [{"config": {"context_length": 8000}}]}]}}, 8000),
    ("lmstudio", {"/api/v1/models": {"models": [{"key": "m", "loaded_instances": []}]}}, 0), ("llamacpp", {"/v1/models": {"data": [{"id": "m", "meta": {"n_ctx": "1024"}}]}}, 0),
])
def test_the_window_is_what_the_server_tells_of_it(tell, provider, pages, window):
    server = tell(stream(OK), pages=pages)
    conversation = mm.Conversation(backend_of(provider, server.root + ("/engines/v1" if provider == "dmr" else "/v1")), settings_of())
    assert conversation.find_window() == window


def test_a_window_that_is_told_only_once_the_model_is_loaded_is_found_later_and_one_of_the_config_counts(tell):
    unloaded, loaded = {"models": []}, {"models": [{"name": "m", "context_length": 1000}]}
    server = tell(counted(100), counted(900), stream(chunk("the summary") + STOP), stream(OK), pages={"/api/ps": (unloaded, loaded)})
    conversation = agent(server, provider="ollama")
    conversation.find_window()
    ask(conversation, "one")
    ask(conversation, "two")
    ask(conversation, "three")
    assert len(server.posts) == 4 and "the summary" in strict(server.posts[3])[0]["content"]
    looks = len(server.gets)
    assert agent(server, contextWindow=777).find_window() == 777 and len(server.gets) == looks


@pytest.mark.parametrize("values, used, compacted", [
    ({"contextWindow": 1000}, 850, True), ({"contextWindow": 1000}, 750, False), ({"contextWindow": 1000, "compactAt": 0.5}, 550, True),
    ({"contextWindow": 1000, "compactAt": 0.5}, 450, False), ({"contextWindow": 1000, "compactAt": 0}, 5000, False), ({"contextWindow": 0}, 5000, False),
    ({"contextWindow": 1000, "compactAt": 1}, 950, False), ({"contextWindow": 1000}, (2600,), False), ({"contextWindow": 1000}, (3800,), True),
])
def test_a_conversation_is_summed_up_once_it_fills_its_part_of_the_window_where_four_characters_are_a_token_if_nothing_is_counted(serve, values, used, compacted):
    counts = isinstance(used, int)  # else the length of the question, and the server counts nothing
    server, recorded = serve(counted(used - 10, 10) if counts else stream(OK), stream(chunk("the summary") + STOP), stream(OK)), []
    conversation = agent(server, record=recorded.append, system="be kind", **values)
    ask(conversation, "the old one" + ("" if counts else "x" * used[0]))
    events = ask(conversation, "the new one")
    assert len(server.posts) == 2 + compacted and ("notice" in kinds(events)) == compacted
    messages = strict(server.posts[-1])
    assert ("the old one" in str(messages)) != compacted and messages[0]["content"] == "be kind" and messages[-1]["content"].endswith("the new one")
    assert sum("history" in item for item in recorded) == compacted and ("the summary" in str(messages)) == compacted


@pytest.mark.parametrize("provider, fields", [
    ("llamacpp", {"chat_template_kwargs": {"enable_thinking": False}}), ("ollama", {"reasoning_effort": "none"}), ("deepseek", {"thinking": {"type": "disabled"}}),
    ("vllm", {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}), ("openrouter", {"reasoning": {"enabled": False}}), ("", {}),
])
def test_a_summary_is_asked_for_without_thinking_tools_and_options_and_its_thinking_is_not_shown(serve, box, provider, fields):
    server = serve(counted(900), stream(chunk(reasoning="secret"), chunk("the summary") + STOP), stream(OK))
    conversation = agent(server, box(), provider, contextWindow=1000, think=True, system="be kind", sampling={"max_tokens": 5})
    ask(conversation, "one")
    events = ask(conversation, "two")
    body = server.arrived(2).body
    message, = body["messages"]
    assert fields.items() <= body.items() and message["role"] == "user" and "one" in message["content"] and not {"tools", "max_tokens"} & set(body)
    assert text(events, "reasoning") == "" and text(events) == "ok" and "secret" not in str(strict(server.arrived(3)))


def test_a_server_that_refuses_the_switch_is_asked_for_the_summary_without_it(serve):
    server = serve(counted(900), reply(400, {"error": {"message": '"m" does not support thinking'}}), stream(chunk("the summary") + STOP), stream(OK))
    conversation = agent(server, provider="ollama", contextWindow=1000)
    ask(conversation, "one")
    assert text(ask(conversation, "two")) == "ok"
    assert "reasoning_effort" not in server.arrived(3).body and "the summary" in str(strict(server.arrived(4)))


OVERFLOW = reply(400, {"error": {"code": 400, "message": "request (9001 tokens) exceeds the available context size (8192 tokens), try increasing it",
                                 "type": "exceed_context_size_error", "n_prompt_tokens": 9001, "n_ctx": 8192}})


@pytest.mark.parametrize("scripts", [
    [stream(STOP)], [stream(chunk("  \n") + STOP)], [stream(chunk("cut of") + chunk(finish="length"))], [stream(chunk(reasoning="I should") + chunk(finish="length"))],
    [stream(chunk(reasoning="I should") + STOP)], [stream(chunk("the us") + sse({"error": {"message": "slot was released"}}))] * 2, [stream(chunk("half"))] * 2,
    [reply(500, {"error": "compute"})], [OVERFLOW], [stream(call(**LIST) + CALLED)],
], ids=["empty", "blank", "cut", "only thinking, cut", "only thinking", "an error", "a cut stream", "a refusal", "too big", "a call"])
def test_a_summary_that_is_none_changes_nothing_and_the_turn_goes_on(serve, box, scripts):
    server, recorded = serve(counted(900), *scripts, stream(chunk("fine") + STOP)), []
    conversation = agent(server, box(), record=recorded.append, contextWindow=1000)
    ask(conversation, "one")
    events = ask(conversation, "two")
    assert text(events) == "fine" and error(events) is None and len([event for event in events if event["type"] == "notice"]) >= 1
    assert conversation.history == [user("one"), assistant("ok"), user("two"), assistant("fine")] == recorded
    assert strict(server.arrived(2 + len(scripts))) == [user("one"), assistant("ok"), user("two")]


def test_ctrl_c_in_a_summary_that_thinks_ends_the_turn(serve):
    thinks = sse({"id": "chatcmpl-7", "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
    server = serve(counted(900), stream(thinks, "hang"), reply(200, {"success": True}))
    conversation = mm.Conversation(backend_of("llamacpp", server.url), settings_of(contextWindow=1000), end_thinking=True)
    ask(conversation, "one")
    events, asked = [], False
    for event in conversation.ask("two"):
        events.append(event)
        if not asked and "summing_up" in event:
            asked = conversation.interrupt()
    assert error(events)[0] == "cancelled" and len(server.posts) == 2


def test_ctrl_c_in_a_summary_changes_nothing(serve):
    server = serve(counted(900), stream(chunk("the sum"), "hang"), stream(OK))
    conversation = agent(server, contextWindow=1000)
    ask(conversation, "one")
    events = []
    for event in conversation.ask("two"):
        events.append(event)
        if len(server.posts) == 2 and not conversation.stopped:
            conversation.interrupt()
    assert error(events)[0] == "cancelled" and conversation.history == [user("one"), assistant("ok"), user("two")]


@pytest.mark.parametrize("at_step", range(1, 8))
def test_a_cut_never_parts_a_call_from_its_result(serve, box, at_step):
    """Three tool turns, each of two calls of the model; the context is full after one of them."""
    def used(step):
        return sse({"choices": [], "usage": {"prompt_tokens": 900 if step == at_step else 100, "completion_tokens": 1}})
    steps = [stream(chunk("look") + call(**LIST) + call(**SECOND) + CALLED[:-len(DONE)] + used(step) + DONE) if step % 2 else stream(chunk(f"answer {step}") + STOP + used(step))
             for step in range(1, 7)]
    summary = [stream(chunk("the summary") + STOP)] if 2 < at_step < 6 else []
    if at_step == 6:
        summary, steps = [], [*steps, stream(chunk("the summary") + STOP)]
    elif at_step == 2:
        summary = [stream(chunk("the summary") + STOP)]
    server = serve(*steps[:at_step], *summary, *steps[at_step:], stream(chunk("fine") + STOP))
    conversation = agent(server, box(), contextWindow=1000, system="be kind")
    for question in ("one", "two", "three", "four"):
        assert error(ask(conversation, question)) is None
    bodies = [strict(post) for post in server.posts]
    assert bodies[-1][-1]["content"].endswith("four") and ("the summary" in str(bodies[-1])) == (2 <= at_step <= 6)
    assert all("(empty)" in str(body) for body in bodies[-1:] if at_step < 6)


def test_an_overflow_is_answered_by_one_compaction(serve):
    server = serve(stream(chunk("a long answer " * 50) + STOP), OVERFLOW, stream(chunk("the summary") + STOP), stream(OK))
    conversation = agent(server)
    ask(conversation, "one")
    events = ask(conversation, "two")
    assert text(events) == "ok" and error(events) is None and len(server.posts) == 4
    assert len(str(strict(server.posts[3]))) < len(str(strict(server.posts[1]))) and strict(server.posts[3])[-1]["content"].endswith("two")


@pytest.mark.parametrize("values, turns, most", [({}, 2, 4), ({}, 1, 1), ({"compactAt": 0}, 2, 1), ({"contextWindow": 8192}, 2, 4)])
def test_an_overflow_that_stays_says_the_two_numbers_after_few_requests_and_keeps_what_was_answered(serve, values, turns, most):
    server, recorded = serve(*[stream(OK)] * (turns - 1), OVERFLOW), []
    conversation = agent(server, record=recorded.append, **values)
    for number in range(turns):
        events = ask(conversation, f"question {number} " + "word " * 2000)
    kind, message = error(events)
    assert kind == "overflow" and "9,001" in message and "8,192" in message and len(server.posts) - (turns - 1) <= most
    assert len(conversation.history) == 2 * turns - 2 and not any("history" in item for item in recorded)
    assert conversation.withdrawn == f"question {turns - 1} " + "word " * 2000


def test_in_one_long_turn_old_results_make_room(serve, box):
    (box, ) = (box("y"),)
    big = [calls("run_command", str(number), command=f"echo result-{number}; seq 2000") for number in range(5)]
    server = serve(*big, OVERFLOW, stream(OK))
    events = ask(agent(server, box))
    assert text(events) == "ok"
    before, after = strict(server.posts[5]), strict(server.posts[6])
    assert len(str(after)) < len(str(before)) / 2 and [m["role"] for m in after] == [m["role"] for m in before] and "result-4" in str(after)


def test_a_summary_that_would_itself_be_too_big_is_cut_to_fit_each_message_to_its_share(serve):
    server = serve(stream(chunk("the summary") + STOP), stream(OK))
    conversation = agent(server, contextWindow=2000)
    for number in range(20):
        conversation.history += [user(f"question-{number} " + "word " * 300), assistant("", {"id": "a", "name": "look", "arguments": {"q": "z" * 3000}, "raw": ""}),
                                 tool("a", "result " * 3000), assistant(f"answer-{number}")]
    events = ask(conversation, "two")
    asked = server.arrived().body["messages"][0]["content"]
    assert len(asked) < 2000 * 3.5 and all(f"question-{number} " in asked and f"answer-{number}" in asked for number in range(20))
    assert text(events) == "ok" and len(server.posts) == 2


@pytest.mark.parametrize("tags, summary", [(False, "tags end with </think>"), ("open", "the sum")])
def test_a_closing_tag_in_a_summary_is_text_unless_the_provider_s_tags_are_parted(serve, tags, summary):
    body = "tags end with </think>" if tags is False else "I count.</think>the sum"
    conversation = agent(serve(stream(chunk(body) + STOP), stream(OK)), contextWindow=10)
    conversation.backend.entry["thinkTags"] = tags
    conversation.history += [user("one " * 20), assistant("two")]
    ask(conversation, "three")
    assert conversation.history[0]["content"] == mm.SUMMED_UP + summary


def test_a_window_that_nobody_knows_is_no_reason_to_leave_anything_out_of_a_summary(serve):
    server = serve(stream(chunk("the summary") + STOP))
    conversation = agent(server)
    conversation.history += [user("first " + "a" * 1000), assistant("second " + "b" * 1000), user("third " + "c" * 1000), assistant("fourth " + "d" * 1000)]
    list(conversation.compact(everything=True))
    asked = server.arrived().body["messages"][0]["content"]
    assert [word for word in ("first", "second", "third", "fourth") if word not in asked] == [] and "[…]" not in asked


def test_a_summary_is_not_summed_up_again_at_every_step_of_a_turn(serve, box):
    (box, ) = (box("y"),)
    step = [calls("run_command", str(number), command="seq 300") for number in range(4)]
    server = serve(counted(900), stream(chunk("the summary") + STOP), *step, stream(OK))
    conversation = agent(server, box, contextWindow=1000)
    ask(conversation, "one")
    summaries = []
    real = conversation.summary
    conversation.summary = lambda messages: summaries.append(messages) or real(messages)
    ask(conversation, "two")
    assert len(summaries) == 1


def test_a_compacted_conversation_is_resumed_as_it_was_and_is_not_said_to_be_cut(serve, run_mm, folder):
    server = serve(stream(OK), stream(chunk("the summary") + STOP), stream(OK))
    run_mm(*at(server), "-i", stdin="one\n/compact\n")
    result = run_mm("-c", "two")
    asked, = strict(server.arrived(3))
    assert "the summary" in asked["content"] and asked["content"].endswith("two") and "no answer" not in result.err


def test_a_summary_longer_than_what_it_sums_up_is_ended_and_changes_nothing(serve):
    conversation = agent(serve(stream(*[chunk("long " * 100)] * 8, "hang")))
    conversation.history += [user("one"), assistant("two")]
    before = list(conversation.history)
    assert list(conversation.compact(everything=True))[-1]["type"] == "notice" and conversation.history == before


# ======================================================================================================================
# 10. Sessions
# ======================================================================================================================

def stored(folder):
    """The messages in the one session file, as they lie there, and its path."""
    path, = folder.glob("*.jsonl")
    return [item for item in map(json.loads, path.read_text().splitlines()) if "role" in item], path


def test_every_message_is_on_disk_when_it_is_complete_and_thinking_never_is(serve, start_mm, folder):
    ended = threading.Event()
    server = serve(stream(chunk(reasoning="secret thought") + call(**LIST) + CALLED), stream(chunk(reasoning="secret thought") + chunk("half"), ended, chunk("more") + STOP))
    process = start_mm(*at(server), "--json", "-t", "list_files", "hi")
    server.arrived(2)
    messages, path = stored(folder)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"] and messages[1]["tool_calls"][0]["name"] == "list_files"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    ended.set()
    done = json.loads(process.communicate(timeout=PATIENCE)[0].splitlines()[-1])
    assert done["session"] == path.name[:-6] and stored(folder)[0][-1]["content"] == "halfmore" and "origin" not in path.read_text()


@pytest.mark.parametrize("script, kept", [
    (["hang"], 1), (stream(chunk(reasoning="hm"), "hang"), 1), (stream(chunk("half"), "hang"), 1), (calls("run_command", command="echo $$ > pid; exec sleep 5"), 2),
], ids=["waiting", "thinking", "answering", "in a tool"])
def test_kill_9_loses_the_answer_in_flight_alone_and_the_next_run_says_so(serve, start_mm, run_mm, folder, tmp_path, script, kept):
    server = serve(script, stream(OK))
    process = start_mm(*at(server), "--json", "-y", "-t", "run_command", "the question")
    server.arrived()
    if len(script) > 1:
        process.stdout.readline()
    deadline = time.monotonic() + PATIENCE
    while not list(folder.glob("*")) or len(stored(folder)[0]) < kept:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    result = run_mm("-c", "the next")
    assert result.out == "ok\n" and "no answer" in result.err
    said = str(strict(server.arrived(2)))
    assert "the question" in said and "the next" in said and ("echo $$" in said) == (kept == 2)


def test_ctrl_c_keeps_the_partial_answer_on_disk(serve, start_mm, run_mm):
    server = serve(stream(chunk("half"), "hang"), stream(OK))
    process = start_mm(*at(server), "--json", "one")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    run_mm("-c", "two")
    assert strict(server.arrived(2)) == [user("one"), assistant("half"), user("two")]


def test_a_dropped_attempt_is_not_stored(serve, run_mm, folder):
    server = serve(stream(chunk("The answer is "), 0.05, chunk("forty"), 0.05, "reset"), stream(chunk("The answer is forty-two.") + STOP))
    assert run_mm(*at(server), "--json", "hi").code == 0
    assert [message["content"] for message in stored(folder)[0]] == ["hi", "The answer is forty-two."]


@pytest.fixture
def session(folder):
    """The path of a session with a tool turn and a chat, written by mm."""
    session = mm.Session({"provider": "", "model": "m"}, lambda fault: None)
    for message in (user("one é"), {**assistant("", {"id": "a", "name": "look", "arguments": None, "raw": '{"q'})}, tool("a"), assistant("two"), user("three"), assistant("four")):
        session.record(message)
    return session.path


def put(path, change):
    with open(path, "rb") as file:
        raw = file.read()
    with open(path, "wb") as file:
        file.write(change(raw))


NOISE = [b"\0" * 64, b"{", b"[1, 2]", b'"role"', b"5", b"null", b'{"role": 5}', b'{"role": "tool"}', b'{"role": "user", "content": 5}', b"\xff\xfe", b'{"history": 5}',
         b'{"history": [{"role": "user"}, 5]}', b'{"role": "assistant", "tool_calls": [{"id": "a"}]}', b"[" * 9999]


@pytest.mark.parametrize("change, count, notes", [
    (lambda raw: raw, 6, []), (lambda raw: raw[:-5], 5, ["line 7"]), (lambda raw: raw[:raw.index("é".encode()) + 1], 0, ["line 2"]), (lambda raw: b"", 0, []),
    (lambda raw: b"\n\n", 0, []), (lambda raw: b"\xef\xbb\xbf" + raw, 6, []), (lambda raw: raw.replace(b"\n", b"\r\n"), 6, []), (lambda raw: raw[:-1], 6, []),
    (lambda raw: raw.replace(b"two", "a\u2028b\x85c".encode()), 6, []), (lambda raw: raw + b"\0" * 64, 6, ["line 8"]),
    (lambda raw: b"garbage\n" + raw, 6, ["line 1 "]), (lambda raw: raw.replace(b"\n", b"\n\n", 3), 6, []),
    *[(lambda raw, noise=noise: raw.replace(b'{"role":"user","content":"three"}\n', b'{"role":"user","content":"three"}\n' + noise + b"\n"), 6, ["line 7"]) for noise in NOISE],
])
def test_every_good_line_is_read_and_a_bad_one_is_named(session, change, count, notes):
    put(session, change)
    about, history, told = mm.load_session(session)
    assert len(history) == count and [token for token in notes if not any(token in note for note in told)] == []
    assert len(told) - sum("no answer" in note for note in told) == len(notes) and all("\n" not in note for note in told)
    again = mm.Session(about, pytest.fail, session)
    again.record(user("after"))
    assert mm.load_session(session)[1] == [*history, user("after")]


def test_whichever_line_is_lost_the_next_request_is_strict(session, serve):
    server, rows = serve(stream(OK)), open(session, "rb").read().split(b"\n")
    for place in range(len(rows) - 1):
        put(session, lambda raw: b"\n".join([*rows[:place], b"garbage", *rows[place + 1:]]))  # noqa: B023
        conversation = agent(server)
        conversation.history += mm.load_session(session)[1]
        ask(conversation, "next")
        assert len(strict(server.posts[-1])) >= 3


def test_what_is_said_after_a_torn_tail_can_be_read_back(serve, run_mm, folder):
    server = serve(stream(OK), stream(chunk("fine") + STOP))
    run_mm(*at(server), "one")
    put(stored(folder)[1], lambda raw: raw[:-5])
    assert "line 3" in run_mm("-c", "two").err
    assert "line 3" in run_mm("-c", "three").err
    assert strict(server.arrived(3)) == [user("one\n\ntwo"), assistant("fine"), user("three")]


def test_two_writers_on_one_session_lose_nothing(session):
    def write(name):
        mine = mm.Session({}, pytest.fail, session)
        for number in range(200):
            mine.record(user(f"{name}{number} " + "x" * 5000))
    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, history, notes = mm.load_session(session)
    found = [message["content"].split()[0] for message in history[6:]]
    assert [name for name in found if name[0] == "a"] == [f"a{n}" for n in range(200)] and len(found) == 400 and "damaged" not in str(notes)


@pytest.mark.parametrize("size", [0, 20, 400, 3400])
def test_a_full_disk_is_told_once_and_what_was_written_stays_readable(session, size):
    told = []
    mine = mm.Session({}, told.append, session)
    with full_disk(os.path.getsize(session) + size):
        for number in range(5):
            mine.record(user(f"{number}" * 1000))
    assert len(told) == 1 and mine.path in told[0]
    mm.Session({}, pytest.fail, session).record(user("after"))
    _, history, notes = mm.load_session(session)
    assert len(history) == 6 + size // 1000 + 1 and history[-1] == user("after") and len([n for n in notes if "skipped" in n]) <= 1


@pytest.mark.parametrize("env", [{"XDG_STATE_HOME": "/proc"}, {"XDG_STATE_HOME": "/dev/null"}, {}])
def test_where_nothing_can_be_written_a_notice_says_so_and_mm_goes_on(serve, run_mm, tmp_path, env):
    if not env:
        (tmp_path / ".local").write_text("in the way")
    result = run_mm(*at(serve(stream(OK))), "hi", env=env)
    assert (result.code, result.out) == (0, "ok\n") and result.err.count("not saved") == 1
    assert "not saved" not in run_mm(*at(serve(stream(OK))), "--no-save", "hi", env=env).err


@pytest.mark.parametrize("env", [None, "", " "])
@pytest.mark.parametrize("known", [True, False])
def test_without_home_in_the_environment_the_user_s_own_is_used_and_else_nothing_is_written(monkeypatch, tmp_path, env, known):
    import pwd
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {True: SimpleNamespace(pw_dir=str(tmp_path / "home"))}[known])  # a container's user may have no entry
    monkeypatch.delenv("HOME") if env is None else monkeypatch.setenv("HOME", env)
    folder, told = mm.sessions_folder(), []
    assert not known or folder.startswith(str(tmp_path / "home"))
    if known or not os.path.isabs(folder) or folder.startswith(os.devnull):
        mm.Session({}, told.append).record(user("hi"))
    assert os.listdir(tmp_path / "here") == [] and bool(told) != known


@pytest.mark.parametrize("args, config", [(["--no-save"], ""), ([], "save: false")])
def test_a_conversation_that_is_not_to_be_saved_is_not(serve, run_mm, tmp_path, folder, args, config):
    (tmp_path / "c.yaml").write_text(config)
    result = run_mm("--config", "c.yaml", *at(serve(stream(OK))), "--json", *args, "hi")
    assert result.events[-1]["session"] is None and not folder.exists()


def test_a_session_remembers_its_server_and_model_and_an_option_beats_them(serve, run_mm, tmp_path):
    first, second = serve(stream(OK)), serve(stream(OK))
    (tmp_path / "c.yaml").write_text("\n".join(["model: from-config", "providers:", f"  one: {{url: '{first.url}'}}", f"  two: {{url: '{second.url}'}}"]))
    config = "--config", "c.yaml"
    run_mm(*config, "-p", "one", "-m", "n", "1")
    run_mm(*config, "-c", "2")
    run_mm(*config, "-c", "-m", "o", "3")
    assert [post.body["model"] for post in first.posts] == ["n", "n", "o"] and not second.posts
    run_mm(*config, "-c", "-p", "two", "4")
    run_mm(*config, "-c", "--url", second.url, "5")
    assert len(second.posts) == 2 and len(strict(second.posts[1])) == 9


def test_a_session_s_url_does_not_get_what_an_option_sends_elsewhere(serve, run_mm, tmp_path):
    first, second = serve(stream(OK)), serve(stream(OK))
    (tmp_path / "c.yaml").write_text(f"providers: {{two: {{url: '{second.url}', apiKeyEnv: TWO_API_KEY}}}}")
    run_mm("--url", first.url, "-m", "m", "1")
    run_mm("--config", "c.yaml", "-c", "-p", "two", "-m", "m", "2", env={"TWO_API_KEY": "k-two"})
    assert (len(first.posts), len(second.posts)) == (1, 1)


@pytest.mark.parametrize("args, model", [
    ([], "n"), (["-p", "one"], "n"), (["-p", "two"], "first"), (["--url", "{two}"], "first"), (["--url", "{one}/chat/completions"], "first"),
    (["-p", "two", "-m", "o"], "o"),
])
def test_another_server_is_not_asked_for_the_model_that_a_session_remembers(serve, run_mm, tmp_path, args, model):
    one, two = serve(stream(OK), models=["first"]), serve(stream(OK), models=["first"])
    (tmp_path / "c.yaml").write_text(f"providers: {{one: {{url: '{one.url}', local: true}}, two: {{url: '{two.url}', local: true}}}}")
    config = "--config", "c.yaml"
    run_mm(*config, "-p", "one", "-m", "n", "1")
    result = run_mm(*config, "-c", *(arg.format(one=one.url, two=two.url) for arg in args), "2")
    assert (one.posts + two.posts)[-1].body["model"] == model and ("using the model first" in result.err) == (model == "first")


def test_the_url_that_a_session_remembers_may_be_said_again_in_any_form(serve, run_mm):
    server = serve(stream(OK), models=["first"])
    run_mm("--url", server.url, "-m", "n", "1")
    run_mm("-c", "--url", server.url + "/chat/completions", "2")
    assert [post.body["model"] for post in server.posts] == ["n", "n"]


def test_a_model_that_was_chosen_in_the_conversation_is_remembered(serve, run_mm):
    server = serve(stream(OK), models=["m", "n"])
    run_mm(*at(server), "-i", stdin="one\n/model n\ntwo\n")
    run_mm("-c", "three")
    run_mm(*at(server), "-i", stdin="/model n\n/clear\nfour\n")
    run_mm("-c", "five")
    assert [post.body["model"] for post in server.posts] == ["m", "n", "n", "n", "n"]


@pytest.mark.parametrize("given, found", [("", "20310102-b"), ("20310101-a", "20310101-a"), ("20310102", "20310102-b"), ("20310101", None), ("zzz", None), ("../x", None)])
def test_a_session_is_found_by_the_beginning_of_its_id(folder, given, found):
    assert fault(mm.find_session, "").kind == "config"
    folder.mkdir(parents=True)
    for age, name in enumerate(("20310102-b", "20310101-a", "20310101-ab")):
        (folder / f"{name}.jsonl").write_text("")
        os.utime(folder / f"{name}.jsonl", (1e9 - age, 1e9 - age))
    if found:
        assert mm.find_session(given) == str(folder / f"{found}.jsonl")
    else:
        raised = fault(mm.find_session, given)
        assert raised.kind == "config" and given in raised.message and "\n" not in raised.message


def test_a_session_that_is_not_there_is_wrong_usage_and_nothing_is_asked(serve, run_mm):
    server = serve(stream(OK))
    for option in (["-c"], ["-r", "zzz"]):
        result = run_mm(*at(server), *option, "hi")
        assert (result.code, result.out, result.err.count("\n"), server.posts) == (2, "", 1, [])


def test_sessions_lists_each_with_its_first_question(serve, run_mm, folder):
    assert run_mm("--sessions").code == 0
    server = serve(stream(OK))
    for question in ("an old\nquestion", "a new one"):
        run_mm(*at(server), question)
    (folder / "broken.jsonl").write_bytes(b"\0\0\n")
    os.utime(folder / "broken.jsonl", (1, 1))
    result = run_mm("--sessions")
    rows = result.out.splitlines()
    assert result.code == 0 and len(rows) == 3 and "a new one" in rows[0] and "an old question" in rows[1] and "broken" in rows[2]
    its_id = rows[1].split()[0]
    run_mm("-r", its_id[:-1], "more")
    assert strict(server.arrived(3)) == [user("an old\nquestion"), assistant("ok"), user("more")]


def test_a_history_that_is_replaced_leaves_what_another_process_said(session):
    about, history, _ = mm.load_session(session)
    first, second = (mm.Session(about, pytest.fail, session) for _ in range(2))
    first.record(user("from the first"))
    second.record(user("from the second"))
    first.record({"history": [user("a summary")]})
    assert [m["content"] for m in mm.load_session(session)[1]][-2:] == ["from the first", "from the second"]
    assert first.path != session and mm.load_session(first.path)[1] == [user("a summary")]


@pytest.mark.parametrize("odd", ["link", "folder", "pipe"])
def test_what_is_no_session_hides_none(session, odd):
    path = os.path.join(os.path.dirname(session), "99999999.jsonl")
    {"link": lambda: os.symlink("/nonexistent", path), "folder": lambda: os.mkdir(path), "pipe": lambda: os.mkfifo(path)}[odd]()
    assert mm.list_sessions() == [session] and mm.find_session("") == session


def test_a_session_keeps_its_system_prompt_and_its_provider_s_own_model_elsewhere(serve, run_mm, tmp_path):
    server, other = serve(stream(OK)), serve(stream(OK))
    (tmp_path / "c.yaml").write_text(f"providers: {{two: {{url: '{other.url}', model: its-own}}}}")
    run_mm(*at(server), "-s", "be kind", "1")
    run_mm("-c", "2")
    run_mm("--config", "c.yaml", "-c", "-p", "two", "3")
    run_mm("--config", "c.yaml", "-c", "4")
    assert [post.body["messages"][0]["content"] for post in server.posts] == ["be kind"] * 2
    assert [post.body["model"] for post in other.posts] == ["its-own"] * 2


def test_nothing_is_kept_of_a_conversation_that_is_not_saved(serve, terminal, tmp_path):
    screen = terminal(*at(serve(stream(OK))), "--no-save")
    screen.prompt()
    screen.send("a secret\r")
    screen.expect("ok")
    screen.prompt()
    screen.send("/bye\r")
    assert screen.code() == 0 and not [path for path in tmp_path.rglob("*") if path.is_file() and b"a secret" in path.read_bytes()]


# ======================================================================================================================
# 11. Display
# ======================================================================================================================

@pytest.mark.parametrize("options, err", [([], "hm so\n"), (["-R"], ""), (["-q"], "hm so\n"), (["-q", "--hide-thinking"], "")])
def test_a_pipe_gets_the_answer_alone_and_stderr_the_thinking_as_plain_text(serve, run_mm, options, err):
    result = run_mm(*at(serve(THOUGHT)), *options, "hi")
    assert (result.code, result.out, result.err) == (0, "The answer.\n", err)


@pytest.mark.parametrize("answer, out", [("a\n\nb\n", "a\n\nb\n"), ("  a  ", "  a  \n"), ("\x1b[31mred\x07\r\n", "\x1b[31mred\x07\r\n")])
def test_a_pipe_gets_the_text_as_it_is_and_a_newline_at_its_end(serve, run_mm, answer, out):
    assert run_mm(*at(serve(stream(chunk(answer) + STOP))), "hi").raw == out.encode()


def test_a_pipe_never_gets_a_second_beginning(serve, run_mm):
    result = run_mm(*at(serve(stream(HALF), stream(OK))), "hi")
    assert (result.code, result.out) == (1, "half\n") and result.err


def test_json_events_are_one_object_a_line(serve, run_mm):
    result = run_mm(*at(serve(THOUGHT)), "--json", "hi")
    assert result.events[:-1] == [{"type": "reasoning", "text": "hm "}, {"type": "reasoning", "text": "so"},
                                  {"type": "answer", "text": "The "}, {"type": "answer", "text": "answer."}]
    assert result.events[-1]["type"] == "done" and result.err == ""
    assert kinds(run_mm(*at(serve(THOUGHT)), "--json", "-R", "hi").events) == ["answer", "answer", "done"]


def test_json_tells_errors_as_events_too(serve, run_mm):
    result = run_mm(*at(serve(reply(401))), "--json", "hi")
    assert (result.code, kinds(result.events), result.events[0]["kind"]) == (1, ["error", "done"], "auth")
    result = run_mm("--json", "--retries", "x", "hi")
    assert (result.code, [event["kind"] for event in result.events]) == (2, ["config"])


def test_a_terminal_shows_thinking_and_then_the_answer(serve, terminal):
    screen = terminal(*at(serve(THOUGHT)), "hi")
    assert screen.code() == 0
    assert plain(screen.shown) == "💭 hm so\r\n🤖 The answer.\r\n"
    assert "\x1b[2;3mhm \x1b[0m" in screen.shown and screen.shown.endswith("The answer.\r\n")


def test_thinking_that_resumes_after_text_gets_a_block_of_its_own(serve, terminal):
    script = stream(chunk(reasoning="a\n\n"), chunk("\n\nb\n"), chunk(reasoning="c"), chunk("d") + STOP)
    screen = terminal(*at(serve(script)), "hi", env={"NO_COLOR": "1"})
    screen.code()
    assert screen.shown == "💭 a\r\n🤖 b\r\n💭 c\r\n🤖 d\r\n"


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_and_a_dumb_terminal_mean_no_styling(serve, terminal, env):
    screen = terminal(*at(serve(THOUGHT, reply(401))), "hi", env=env)
    assert screen.code() == 0 and screen.shown == "💭 hm so\r\n🤖 The answer.\r\n"
    assert "\x1b" not in terminal("--retries", "x", "hi", env=env).expect("retries")


def test_a_terminal_without_utf_8_gets_words_for_marks(serve, terminal):
    screen = terminal(*at(serve(THOUGHT)), "--stats", "hi", env={"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"})
    assert screen.code() == 0 and screen.shown.startswith("thinking: hm so\r\nanswer: The answer.\r\nthinking: ")


def test_each_line_of_a_notice_is_marked_and_dim(serve, terminal, tmp_path):
    (tmp_path / "c.json").write_text('{"one": 1, "two": 2}')
    screen = terminal("--config", "c.json", *at(serve(stream(OK))), "hi")
    screen.code()
    assert len(re.findall(r"\x1b\[2mmm: c\.json: (?:one|two)", screen.shown)) == 2


def test_a_status_line_is_cut_to_the_width_of_the_terminal(serve, terminal):
    on = threading.Event()
    screen = terminal(*at(serve(stream(on, OK))), "hi", prelude='stty cols 12 <"$TTY";')
    screen.expect("waiting for\x1b")
    on.set()
    assert screen.code() == 0 and "waiting for " not in screen.shown


def progress(processed):
    return sse({"choices": [{"delta": {"content": None}}], "prompt_progress": {"total": 210, "cache": 10, "processed": processed}})


@pytest.mark.parametrize("options, steps, status", [
    ([], [progress(10), progress(92)], "reading the prompt 41 %"), ([], [], "1 s"), (["-R"], [chunk(reasoning="secret")] * 2, "thinking"),
])
def test_the_status_line_tells_what_is_waited_for_and_is_wiped(serve, terminal, options, steps, status):
    on = threading.Event()
    screen = terminal(*at(serve(stream(*steps, on, progress(210), OK))), *options, "hi")
    screen.expect(status)
    on.set()
    assert screen.code() == 0 and "secret" not in screen.shown and plain(screen.shown).endswith("\r\x1b[K🤖 ok\r\n")


@pytest.mark.parametrize("args", [["-q"], []])
def test_quiet_and_a_pipe_get_no_status_line(serve, terminal, args):
    server = serve(stream(progress(10), progress(92), 0.1, OK))
    screen = terminal(*at(server), *args, "hi", redirect='<"$TTY" >"$TTY" 2>' + ("&1" if args else "err"))
    screen.code()
    assert screen.shown == "🤖 ok\r\n"


EVIL = "\x1b]0;title\x07\x1b[2J\x1b]52;c;ZXZpbA==\x1b\\\x9b31m\x9d0;x\x9c\x08\x08\x7f\x00over\rwrite\ttab"


def obeyed(shown):
    """What a terminal would have obeyed in this output, beside mm's own styles and its wiping of the status line."""
    shown = re.sub(r"\x1b\[(0|2|31|2;3)m|\r\x1b\[K|\r\n", "", shown)
    return re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


@pytest.mark.parametrize("script", [
    stream(chunk(reasoning=EVIL), chunk(EVIL) + STOP), stream(*[chunk(character) for character in EVIL], STOP),
    stream(chunk(EVIL) + sse({"error": {"message": EVIL}})), reply(400, {"error": {"message": EVIL}}), reply(404, EVIL.encode()),
    stream(call(index=0, id=EVIL, name=EVIL, arguments=json.dumps({"q": EVIL})) + STOP),
    reply(200, b"<html><title>" + EVIL.encode() + b"</title>"), reply(302, Location="/\x9b31m"),
], ids=["text", "split", "an error in the stream", "a refusal", "a plain refusal", "a tool call", "a page", "a redirect"])
def test_a_terminal_obeys_nothing_that_a_server_sends(serve, terminal, script):
    screen = terminal(*at(serve(script)), "--max-steps", "1", "--retries", "0", "hi")
    screen.code()
    assert obeyed(screen.shown) == [] and len(screen.shown) > 5


def test_a_terminal_obeys_nothing_in_a_model_s_name(serve, terminal):
    server = serve(stream(OK), models=[EVIL + "m", "n"])
    for args in (["--models"], ["hi"]):
        screen = terminal("--url", server.url, *args)
        screen.code()
        assert obeyed(screen.shown) == [] and "tab" in screen.shown


@pytest.mark.parametrize("env, expected", [
    ({"PYTHONIOENCODING": "ascii"}, b"caf? ? done\n"), ({"PYTHONIOENCODING": "latin-1"}, b"caf\xe9 ? done\n"),
    ({"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "café 🎉 done\n".encode()),
    ({"LC_ALL": "C", "LANG": "C"}, "café 🎉 done\n".encode()),
])
def test_output_never_raises_for_a_character(serve, run_mm, env, expected):
    server = serve(stream(chunk(reasoning="🎉"), chunk("café "), chunk("🎉 done") + STOP))
    result = run_mm(*at(server), "na\u00efve – ✓", env=env)
    assert (result.code, result.raw) == (0, expected)
    assert server.arrived().body["messages"] == [user("na\u00efve – ✓")]
    assert text(run_mm(*at(server), "--json", "hi", env=env).events) == "café 🎉 done"


def test_a_closed_pipe_ends_mm_quietly(serve, start_mm):
    server = serve(stream(chunk("first\n"), (chunk("more\n") * 50, 0.01)))
    process = start_mm(*at(server), "hi")
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(PATIENCE) in (0, 1, 141)
    server.gone()


@pytest.mark.parametrize("number, code, body", [(signal.SIGINT, 130, chunk("x" * 1000) * 300), (signal.SIGTERM, 143, chunk(reasoning="x" * 1000) * 300)],
                         ids=["stdout", "stderr"])
def test_a_signal_ends_mm_though_nobody_reads_what_it_writes(serve, start_mm, number, code, body):
    server = serve(stream(body, "hang"))
    process = start_mm("--watchdog", "0", *at(server), "hi")
    server.arrived()
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.7)  # a write counts as stuck after half a second
        process.send_signal(number)
    assert process.returncode == code


def test_a_signal_that_was_ignored_before_stays_ignored(serve, start_mm):
    ended = threading.Event()
    server = serve(stream(chunk("one"), ended, OK))
    process = start_mm(*at(server), "hi", prelude="trap '' INT HUP;")
    assert os.read(process.stdout.fileno(), 3) == b"one"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGHUP)
    ended.set()
    assert process.communicate(timeout=PATIENCE)[0] == b"ok\n" and process.returncode == 0


@pytest.mark.parametrize("redirect, code, out", [(">&-", 1, ""), (">&- 2>&-", 1, ""), ("<&-", 0, "ok\n"), ("2>&-", 0, "ok\n")])
def test_a_closed_output_is_told_like_a_full_disk_and_other_closed_streams_are_no_fault(serve, run_mm, redirect, code, out):
    result = run_mm(*at(serve(stream(OK))), "hi", redirect=redirect)
    assert (result.code, result.out) == (code, out) and ("cannot be written" in result.err) == (redirect == ">&-")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_full_disk_is_one_line(serve, run_mm, option):
    result = run_mm(*at(serve(stream(OK))), *option, "hi", redirect=">/dev/full")
    assert result.code == 1 and result.err.count("\n") == 1 and "No space" in result.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("redirect", [">&-", ">/dev/full"])
def test_help_and_version_that_cannot_be_written_are_one_line(run_mm, option, redirect):
    result = run_mm(option, redirect=redirect)
    assert result.code == 1 and result.err.count("\n") == 1 and "cannot be written" in result.err


def test_a_misspelt_option_is_named_with_the_one_that_is_like_it(run_mm):
    result = run_mm("--modle", "m", "hi")
    assert result.code == 2 and result.err.count("\n") == 1 and "--modle (did you mean --model?)" in result.err


def test_stats_are_a_line_after_the_answer(serve, run_mm):
    figures = usage(prompt_tokens=3412, completion_tokens=90, prompt_tokens_details={"cached_tokens": 3390})
    result = run_mm(*at(serve(stream(chunk("ok") + STOP + figures))), "--stats", "hi")
    assert result.out == "ok\n" and all(figure in result.err for figure in ("3,412", "3,390", "90 tok")) and "\x1b" not in result.err


def a_done(tokens=(812, 90), spent=(38.2, 4.1), **rows):
    """A `done` with a timeline of these rows."""
    line = mm.Timeline()
    for kind, row in rows.items():
        line.rows[kind] = {tenth: tokens for tenth, tokens in enumerate(row) if tokens}
    details = {"prompt_tokens": 3412, "completion_tokens": sum(tokens), "prompt_tokens_details": {"cached_tokens": 3390}}
    return {"usage": details, "timings": None, "tokens": tokens, "timeline": line,
            "seconds": {"first_token": 0.4, "thinking": spent[0], "answer": spent[1], "total": 42.8}}


def test_figures_show_thinking_and_answer_apart_with_their_tokens_over_time():
    line = mm.figures(a_done(prompt=[1000, 2000], reasoning=[0, 0, 1, 2, 8], answer=[0, 0, 0, 0, 0, 4, 4]))
    assert re.fullmatch(r"💭 38.2 s · 812 tok · 21 tok/s ▁▂█ 🤖 4.1 s · 90 tok · 22 tok/s ▄▄ · prompt 3,412 tok, 3,390 from cache ▄█"
                        r" · first token after 0.4 s · 42.8 s in all", line)
    assert mm.figures(a_done((0, 90), (0.0, 4.1), call=[3, 3])).startswith("🤖 4.1 s · 90 tok · 22 tok/s █")


@pytest.mark.parametrize("columns, cells", [(24, 8), (60, 20), (200, 48)])
def test_bars_take_a_third_of_the_terminal_and_share_one_scale_of_time(columns, cells):
    first = mm.figures(a_done(reasoning=[3] * 300, answer=[0] * 300 + [5] * 100), columns).split("\n")[0]
    thinking, answer = (sum(char in "▁▂▃▄▅▆▇█" for char in part) for part in first.split("🤖"))
    assert cells // 2 < thinking + answer <= cells + 2 and thinking in (3 * answer, 3 * answer - 1, 3 * answer - 2)


def test_the_timeline_keeps_every_token_however_long_it_takes():
    line = mm.Timeline()
    line.started = 0.0
    for second in (0, 1, 2, 3, 100, 100, 5000):
        line.add("reasoning", 1, line.started + second)
    line.add("prompt", 6, line.started + 0.25, line.started + 0.05)
    assert line.rows["prompt"] == {0: 2, 1: 2, 2: 2}
    row = line.rows["reasoning"]
    assert sum(row.values()) == 7 and row[0] == 1 and row[1000] == 2 and row[50000] == 1


def test_ctrl_c_in_one_shot_gives_130_and_leaves_the_terminal_as_it_was(serve, terminal):
    server = serve(stream(HALF, "hang"))
    screen = terminal(*at(server), "hi")
    screen.expect("half")
    screen.send("\x03")
    assert screen.code() == 130 and "Traceback" not in screen.shown and plain(screen.shown).endswith("\r\n")
    assert termios.tcgetattr(screen.slave) == screen.attributes
    server.gone()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("script", [["hang"], stream(HALF, "hang")], ids=["waiting", "answering"])
def test_a_signal_ends_a_run_without_a_traceback(serve, start_mm, script, number, code):
    server = serve(script)
    process = start_mm(*at(server), "--json", "hi")
    server.arrived()
    if len(script) > 1:
        process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code and b"Traceback" not in err
    server.gone()


def test_what_is_said_before_a_call_and_after_it_is_not_glued_in_a_pipe(serve, run_mm):
    first = stream(chunk("Let me look.") + call(index=0, id="a", name="list_files", arguments="{}") + CALLED)
    assert run_mm(*at(serve(first, stream(chunk("It is empty.") + STOP))), "-t", "list_files", "hi").out == "Let me look.\nIt is empty.\n"


# ======================================================================================================================
# 12. The REPL
# ======================================================================================================================

@pytest.fixture
def repl(serve, terminal):
    """A REPL at its first prompt; -> (server, terminal)."""
    def start(*scripts, args=(), **how):
        server = serve(*scripts, models=["m", "n"])
        screen = terminal(*at(server), *args, **how)
        screen.prompt()
        return server, screen
    return start


def test_a_conversation_goes_back_to_the_model_and_ends_at_ctrl_d(repl, tmp_path):
    history = tmp_path / ".local/state/mm/history"
    history.parent.mkdir(parents=True)
    history.write_text("before\n")
    history.chmod(0o644)
    server, screen = repl(THOUGHT)
    assert plain(screen.shown).endswith("\n> ") and "m" not in screen.shown.rpartition("\n")[2]  # no colours: readline counts them
    for word in ("one", "two"):
        screen.send(word + "\r")
        screen.expect("The answer.")
        screen.prompt()
    assert server.arrived(2).body["messages"] == [user("one"), assistant("The answer."), user("two")]
    screen.send("\x04")
    assert screen.code() == 0 and termios.tcgetattr(screen.slave) == screen.attributes
    assert history.read_text().split("\n") == ["before", "one", "two", ""]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.parametrize("command", ["/bye", "/exit", "/quit"])
def test_a_command_leaves(run_mm, serve, command):
    server = serve(stream(OK))
    result = run_mm(*at(server), "-i", stdin=f"one\n{command}\ntwo\n")
    assert result.code == 0 and question(server) == "one" and len(server.posts) == 1


@pytest.mark.parametrize("script, marks", [
    (["hang"], []), (stream("hang"), []), (stream(chunk(reasoning="hm"), "hang"), ["hm"]),
    (stream(chunk(reasoning="hm"), HALF, "hang"), ["hm", "half"]),
], ids=["before the headers", "before a token", "thinking", "answering"])
def test_ctrl_c_stops_the_answer_and_the_prompt_comes_back(repl, script, marks):
    server, screen = repl(script, script, stream(OK))
    for number, word in ((1, "one"), (2, "two")):
        screen.send(word + "\r")
        server.arrived(number)
        for mark in marks:
            screen.expect(mark)
        screen.send("\x03")
        screen.prompt()
        server.gone(number)
    screen.send("three\r")
    screen.expect("ok")
    partial = [assistant("half")] if "half" in marks else []
    expected = [user("one"), *partial, user("two"), *partial, user("three")] if partial else [user("one\n\ntwo\n\nthree")]
    assert server.arrived(3).body["messages"] == expected


def test_ctrl_c_twice_and_at_the_empty_prompt_does_not_leave(repl):
    server, screen = repl(stream(HALF, "hang"), stream(OK))
    screen.send("one\r")
    screen.expect("half")
    screen.send("\x03\x03")
    screen.prompt()
    for _ in range(2):
        screen.send("\x03")
        screen.prompt()
    screen.send("half typed\x03")
    screen.prompt()
    screen.send("two\r")
    screen.expect("ok")
    assert question(server, 2) == "two"


@pytest.mark.parametrize("keys, asked", [
    (['"""first', "  second", "", 'last"""'], "first\n  second\n\nlast"), (['"""', "first", '"""'], "first"),
    (["first\\", "second\\", "third"], "first\nsecond\nthird"), (["\x1b[200~first\nsecond\n\nlast\x1b[201~"], "first\nsecond\n\nlast"),
    (["na\u00efve ✓ 🎉"], "na\u00efve ✓ 🎉"), ([" /help me"], "/help me"), (["x" * 5000 + "END"], "x" * 5000 + "END"),
], ids=["a block", "a block, its quotes alone", "backslashes", "a bracketed paste", "UTF-8", "a space and a command", "a long line"])
def test_what_is_typed_is_one_question(repl, keys, asked):
    server, screen = repl(stream(OK))
    for line in keys[:-1]:
        screen.send(line + "\r")
        screen.expect(". ")
    screen.send(keys[-1] + "\r")
    screen.expect("ok")
    assert question(server).strip() == asked and len(server.posts) == 1


@pytest.mark.parametrize("how", [{"env": {"TERM": "dumb"}}, {"redirect": '<"$TTY" >out 2>"$TTY"'}], ids=["dumb", "stdout is a file"])
@pytest.mark.parametrize("keys, asked", [("first\nsecond\n\nlast\n", "first\nsecond\n\nlast"), (b"caf\xe9\nend\n", "caf\ufffd\nend")])
def test_pasted_lines_are_one_question_without_bracketed_paste(serve, terminal, how, keys, asked):
    server = serve(stream(OK))
    screen = terminal(*at(server), "-i", "first", **how)
    server.arrived()
    screen.take(0.3)
    screen.send(keys)
    assert question(server, 2) == asked or "env" in how and question(server, 2) == asked.replace("\ufffd", "")  # readline drops it


def test_a_line_that_the_terminal_would_cut_is_whole_or_warned_about_where_it_is_seen(serve, terminal):
    server = serve(stream(OK))
    screen = terminal(*at(server), "-i", redirect='<"$TTY" >out 2>"$TTY"')
    screen.take(0.5)
    screen.send("x" * 5000 + "END\n")
    if not question(server).endswith("END"):
        screen.expect("4,095")


@pytest.mark.parametrize("lines, expected", [
    (["/model n", "hi"], [("n", [user("hi")])]), (["one", "/clear", "two"], [("m", [user("one")]), ("m", [user("two")])]),
    (["/system be kind", "one", "/system -", "two"],
     [("m", [{"role": "system", "content": "be kind"}, user("one")]), ("m", [user("one"), assistant("ok"), user("two")])]),
    (["/clearly wrong", "hi"], [("m", [user("hi")])]),
    (["/usr/bin/python fails, why?", "", "  "], [("m", [user("/usr/bin/python fails, why?")])]),
])
def test_commands_change_what_is_asked(serve, run_mm, lines, expected):
    server = serve(stream(OK))
    assert run_mm(*at(server), "-i", stdin="\n".join(lines) + "\n").code == 0
    assert [(post.body["model"], post.body["messages"]) for post in server.posts] == expected


@pytest.mark.parametrize("state, sent", [("on", {"enable_thinking": True}), ("off", {"enable_thinking": False}), ("auto", None)])
def test_think_switches_the_thinking(serve, run_mm, state, sent):
    server = serve(stream(OK))
    run_mm("-p", "llamacpp", *at(server), "--think", "-i", stdin=f"/think {state}\nhi\n")
    assert server.arrived().body.get("chat_template_kwargs") == sent


@pytest.mark.parametrize("lines, tokens", [
    (["/help"], ["/clear", "/model", "/models", "/think", "/show", "/system", "/stats", "/bye"]), (["/?"], ["/clear", "/stats"]),
    (["/models"], ["* m", "  n"]), (["/model"], ["m"]), (["/system"], ["none"]),
    (["/stats", "hi", "/stats"], ["nothing", "s in all"]), (["/think maybe"], ["on, off"]), (["/nonsense"], ["/nonsense", "/help"]),
])
def test_commands_say(serve, run_mm, lines, tokens):
    result = run_mm(*at(serve(stream(OK), models=["m", "n"])), "-i", stdin="\n".join(lines) + "\n")
    places = [result.err.find(token) for token in tokens]
    assert -1 not in places and places == sorted(places) and result.out == "ok\n" * lines.count("hi")


def test_show_hides_and_shows_the_thinking(repl):
    server, screen = repl(THOUGHT)
    for command, seen in (("/show off", False), ("/show on", True)):
        screen.send(command + "\r")
        screen.prompt()
        screen.send("hi\r")
        assert ("hm" in screen.expect("The answer.")) == seen
        screen.prompt()


def test_ctrl_c_hit_in_haste_does_not_end_a_conversation_that_began_with_a_question(serve, terminal):
    screen = terminal(*at(serve(stream(HALF, "hang"), stream(OK))), "-i", "one")
    screen.expect("half")
    for _ in range(3):
        screen.process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    screen.prompt()
    screen.send("two\r")
    screen.expect("ok")


def test_stats_in_a_conversation_of_json_are_a_notice(serve, run_mm):
    result = run_mm(*at(serve(stream(OK))), "-i", "--json", stdin="hi\n/stats\n")
    assert result.code == 0 and any("s in all" in event["message"] for event in result.events if event["type"] == "notice")


def test_a_line_without_end_in_a_pipe_is_an_error(run_mm):
    result = run_mm("--url", "http://127.0.0.1:1", "-m", "m", "-i", stdin=b"x" * (mm.MOST_TEXT + 1000))
    assert result.code == 2 and "MiB" in result.err


def test_the_repl_goes_on_after_an_error_and_starts_with_the_question_of_i(serve, terminal):
    server = serve(reply(500, {"error": "slot lost"}), stream(OK))
    screen = terminal(*at(server), "-i", "one")
    screen.expect("slot lost")
    screen.prompt()
    screen.send("two\r")
    screen.expect("ok")
    assert server.arrived(2).body["messages"] == [user("two")]


def test_a_history_file_that_cannot_be_written_or_read_is_no_fault(repl, tmp_path):
    (tmp_path / ".local").write_text("a file where a folder should be")
    server, screen = repl(stream(OK))
    screen.send("hi\r")
    screen.expect("ok")
    screen.prompt()
    screen.send("\x04")
    assert screen.code() == 0 and "Traceback" not in screen.shown


@pytest.mark.parametrize("answering", [False, True])
def test_sigterm_leaves_the_terminal_as_it_was(repl, answering):
    server, screen = repl(stream(HALF, "hang"))
    if answering:
        screen.send("hi\r")
        screen.expect("half")
    screen.process.terminate()
    assert screen.code() == 143 and termios.tcgetattr(screen.slave) == screen.attributes
    assert "Traceback" not in screen.shown


def test_retry_asks_the_last_question_again_and_the_session_holds_it_once(serve, run_mm, folder):
    server = serve(stream(OK), stream(chunk("bad") + STOP), stream(chunk("better") + STOP))
    assert said(run_mm(*at(server), "-i", stdin="/retry\none\ntwo\n/retry\n")).count("better") == 1
    assert len(server.posts) == 3 and server.posts[1].body == server.posts[2].body
    path, = folder.glob("*")
    assert mm.load_session(path)[1] == [user("one"), assistant("ok"), user("two"), assistant("better")]


def test_a_question_that_was_refused_is_gone_and_can_be_asked_again(serve, run_mm, folder):
    refused = reply(400, {"error": {"message": "no such luck"}})
    server = serve(refused, stream(OK), refused, stream(OK))
    run_mm(*at(server), "-i", stdin="bad\ngood\nworse\n/retry\n")
    asked = [[message["content"] for message in post.body["messages"]] for post in server.posts]
    assert asked == [["bad"], ["good"], ["good", "ok", "worse"], ["good", "ok", "worse"]]
    path, = folder.glob("*")
    assert mm.load_session(path)[1] == [user("good"), assistant("ok"), user("worse"), assistant("ok")]


@pytest.fixture
def silent_url():
    """The https URL of what takes connections and never says a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield f"https://127.0.0.1:{silent.getsockname()[1]}"


@pytest.mark.parametrize("options", [["hi"], ["--models"], ["--check"]])
def test_a_server_that_is_silent_at_a_tls_greeting_may_speak_plain_http(run_mm, silent_url, options):
    result = run_mm("--url", silent_url, *options)
    assert result.code in (1, 2) and "http://" in result.out + result.err


def test_a_tls_greeting_without_answer_is_not_asked_again(monkeypatch, silent_url):
    monkeypatch.setattr(mm, "CONNECT_SECONDS", 0.3)
    events = ask(mm.Conversation(backend_of(url=silent_url), settings_of()))
    assert kinds(events) == ["error", "done"] and "http://" in error(events)[1]


def test_clear_begins_another_session_and_the_old_one_stays(serve, run_mm, folder):
    server = serve(stream(OK))
    run_mm(*at(server), "-i", stdin="one\n/clear\ntwo\n/sessions\n")
    histories = sorted(mm.load_session(path)[1][0]["content"] for path in folder.glob("*"))
    assert histories == ["one", "two"] and strict(server.arrived(2)) == [user("two")]


def test_sessions_and_save_show_and_keep_the_conversation(serve, run_mm, tmp_path):
    (tmp_path / "there.md").write_text("mine")
    server = serve(stream(chunk("Look.") + call(**LIST) + CALLED), stream(chunk(reasoning="secret") + chunk("The answer") + STOP))
    result = run_mm(*at(server), "-s", "be kind", "-t", "list_files", "-i", stdin="the question\n/sessions\n/save out.md\n/save there.md\n/save no/where.md\n/save\n")
    saved = (tmp_path / "out.md").read_text()
    places = [saved.index(word) for word in ("be kind", "the question", "Look.", "list_files", "there.md", "The answer")]
    assert places == sorted(places) and "secret" not in saved and (tmp_path / "there.md").read_text() == "mine"
    assert result.code == 0 and "the question" in said(result) and said(result).count("there.md") >= 2 and "no/where.md" in said(result)


def test_tools_shows_and_switches_them(serve, run_mm):
    server = serve(stream(OK))
    result = run_mm(*at(server), "-t", "read_file", "-i", stdin="/tools\none\n/tools list_files\ntwo\n/tools all\nthree\n/tools read_file zzz\nfour\n/tools none\nfive\n")
    names = [[entry["function"]["name"] for entry in post.body.get("tools", [])] for post in server.posts]
    everything = sorted(mm.BUILT_IN)
    assert names == [["read_file"], ["list_files", "read_file"], everything, [name for name in everything if name != "read_file"], []]
    assert "zzz" in said(result) and all(name in said(result) for name in everything)


def test_stats_and_compact_show_the_window_and_how_full_it_is(serve, run_mm, tmp_path):
    (tmp_path / "c.yaml").write_text("contextWindow: 2000\n")
    server = serve(counted(900, 100), stream(chunk("the summary") + STOP), stream(OK))
    result = run_mm("--config", "c.yaml", *at(server), "-i", stdin="one\n/stats\n/compact\n/stats\ntwo\n")
    assert re.search(r"1,000\D+2,000\D+50 ?%", said(result)) and "1,000 tokens before" in said(result)
    summary, after = server.arrived(2), strict(server.arrived(3))
    assert len(summary.body["messages"]) == 1 and len(after) == 1 and "the summary" in after[0]["content"] and after[0]["content"].endswith("two")


def test_while_a_summary_is_written_the_status_line_says_so(serve, terminal):
    on = threading.Event()
    screen = terminal(*at(serve(stream(OK), stream(progress(10), progress(210), *[chunk("sum")] * 3, on, STOP))), "-i", "one")
    screen.prompt()
    screen.send("/compact\r")
    screen.expect("summing up")
    on.set()
    screen.expect("now")


@pytest.mark.parametrize("scripts, code", [([stream(OK), stream(OK)], 0), ([stream(OK), reply(500, {"error": "x"}), stream(OK)], 1)])
def test_a_conversation_from_a_pipe_ends_with_the_exit_code_of_what_failed(serve, run_mm, scripts, code):
    assert run_mm(*at(serve(*scripts)), "-i", stdin="one\n" * len(scripts)).code == code


def test_ctrl_c_while_the_server_is_probed_ends_neither_mm_nor_the_question(serve, terminal):
    asked = threading.Event()
    server = serve(stream(OK))
    screen = terminal("-p", "llamacpp", *at(server))
    screen.prompt()
    real, server.take = server.take, lambda sock: [asked.set, "hang"] if not asked.is_set() else real(sock)
    server.play, play = (lambda step, sock: step() if callable(step) else play(step, sock)), server.play
    screen.send("one\r")
    assert asked.wait(PATIENCE)
    screen.send("\x03")
    screen.prompt()
    screen.send("two\r")
    screen.expect("ok")
    screen.prompt()
    assert "one" in str(strict(server.arrived())) and "two" in str(strict(server.arrived()))
    screen.send("/bye\r")
    assert screen.code() == 0


def test_ctrl_c_hit_in_haste_never_ends_a_conversation(serve, terminal):
    server = serve(stream(chunk("half"), "hang"), stream(OK))
    screen = terminal(*at(server))
    screen.prompt()
    screen.send("one\r")
    screen.expect("half")
    for _ in range(200):
        screen.send("\x03")
    deadline = time.monotonic() + PATIENCE
    while len(server.posts) < 2:  # CPython's readline may take the last Ctrl-C with the next line
        assert screen.process.poll() is None and time.monotonic() < deadline, screen.shown
        screen.send("two\r")
        screen.take(0.5)
    screen.expect("ok")
    assert "one" in str(strict(server.posts[1]))


# ======================================================================================================================
# 13. Demo and replay
# ======================================================================================================================

def test_the_demo_needs_no_server_and_says_that_it_is_scripted(run_mm):
    result = run_mm("--demo", "--json", "who are you?", env={"http_proxy": "http://127.0.0.1:1"})
    assert result.code == 0 and "who are you?" in text(result.events, "reasoning") and "script" in text(result.events)
    assert "script" in result.events[0]["message"] and result.events[-1]["provider"] == "demo"
    assert [event["processed"] for event in result.events if event["type"] == "progress"]


def test_a_replay_of_several_streams_shows_each(run_mm, tmp_path):
    (tmp_path / "tap").write_bytes(OK.replace(b'"ok"', b'"one "') + OK.replace(b'"ok"', b'"two"'))
    result = run_mm("--replay", "tap")
    assert (result.code, result.out) == (0, "one two\n")


@pytest.mark.parametrize("body, code", [(HALF, 1), (b"", 1), (sse({"error": "slot lost"}), 1), (OK, 0)])
def test_a_replay_has_the_exit_code_of_its_stream(run_mm, tmp_path, body, code):
    (tmp_path / "tap").write_bytes(body)
    result = run_mm("--replay", "tap")
    assert (result.code, result.err.count("\n")) == (code, code)


def test_a_replay_tells_the_figures_that_the_stream_carries_and_no_time_of_its_own(run_mm, tmp_path):
    timings = {"prompt_n": 20, "cache_n": 5, "prompt_ms": 1500.0, "predicted_n": 40, "predicted_ms": 8000.0}
    (tmp_path / "tap").write_bytes(chunk(reasoning="a") * 3 + chunk("ok") + STOP + sse({"choices": [], "timings": timings}) + DONE)
    result = run_mm("--replay", "tap", "--stats")
    assert [part in result.err for part in ("6.0 s · 30 tok · 5 tok/s", "2.0 s · 10 tok", "prompt 25 tok, 5 from cache", "9.5 s in all")] == [True] * 4
    (tmp_path / "tap").write_bytes(OK)
    assert " s" not in run_mm("--replay", "tap", "--stats").err
    odd = {"prompt_ms": "1", "predicted_ms": -5, "predicted_n": True, "prompt_n": 1e308}
    (tmp_path / "tap").write_bytes(chunk("ok") + STOP + sse({"choices": [], "timings": odd, "usage": {"completion_tokens": "x"}}) + DONE)
    assert "1 tok" in run_mm("--replay", "tap", "--stats").err


def test_a_replay_separates_the_tags_of_the_provider_that_is_named(run_mm, tmp_path):
    (tmp_path / "tap").write_bytes(chunk("hm</think>ok") + STOP + DONE)
    (tmp_path / "c.json").write_text('{"providers": {"box": {"like": "llamacpp", "thinkTags": "open"}}}')
    assert run_mm("--replay", "tap", "--config", "c.json").out == "hm</think>ok\n"
    assert run_mm("--replay", "tap", "--config", "c.json", "-p", "box").out == "ok\n"


def test_a_replay_is_paced_on_a_terminal_alone(run_mm, terminal, tmp_path):
    (tmp_path / "tap").write_bytes(chunk("word ") * 3000 + STOP + DONE)  # a minute, for a person
    assert run_mm("--replay", "tap").out == "word " * 3000 + "\n"
    screen = terminal("--replay", "tap")
    screen.expect("word word")
    screen.send("\x03")
    assert screen.code() == 130 and "Traceback" not in screen.shown and termios.tcgetattr(screen.slave) == screen.attributes

@pytest.mark.parametrize("headers, body, wait", [
    ({"Retry_After": "0"}, {}, 0), ({"Retry_After": "0.2"}, {}, 0.2), ({"retry_after_ms": "200", "Retry_After": "9"}, {}, 0.2),
    ({"retry_after_ms": "1.2.3", "Retry_After": "0.2"}, {}, 0.2),
    ({"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}, {}, 0), ({}, {"details": [{"retryDelay": "0.2s"}]}, 0.2),
])
def test_a_busy_server_says_how_long_in_many_ways(serve, headers, body, wait):
    busy = reply(429, {"error": {"message": "slow down", **body}}, **headers)
    server, started = serve(busy, stream(OK)), time.monotonic()
    events = ask(talk(server))
    assert kinds(events) == ["retry", "answer", "done"] and wait <= time.monotonic() - started < wait + 0.8


@pytest.mark.parametrize("headers, error_body, tokens", [
    ({}, {"message": "You exceeded your quota", "code": "insufficient_quota"}, ["credit", "billing"]),
    ({}, {"message": "You exceeded your quota", "type": "insufficient_quota", "code": None}, ["credit", "billing"]),
    ({"Retry_After": "300"}, {"message": "slow down"}, ["5 minutes"]),
])
def test_a_wait_that_is_too_long_or_in_vain_is_told_and_not_taken(serve, headers, error_body, tokens):
    server = serve(reply(429, {"error": error_body}, **headers))
    kind, message = error(ask(talk(server)))
    assert kind == "rate_limited" and len(server.posts) == 1 and all(token in message for token in tokens)


@pytest.mark.parametrize("status, tokens, posts", [(524, ["524", "did not answer"], 2), (413, ["413", "too large"], 1), (500, ["500"], 1)])
def test_a_web_page_of_a_gateway_is_told_by_its_status(serve, status, tokens, posts):
    page = f"<!DOCTYPE html><html><head><title>{status} | box</title></head></html>".encode()
    server = serve(reply(status, page, Content_Type="text/html", Retry_After=0))
    _, message = error(ask(talk(server)))
    assert all(token in message for token in tokens) and "URL" not in message and len(server.posts) == posts


@pytest.mark.parametrize("figures, prompt, produced", [
    ({"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 942, "prompt_tokens_details": {"cached_tokens": 900}}, 940, (0, 2)),
    ({"prompt_tokens": 940, "completion_tokens": 2, "total_tokens": 942, "prompt_tokens_details": {"cached_tokens": 900}}, 940, (0, 2)),
    ({"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 45, "completion_tokens_details": {"reasoning_tokens": 30}}, 12, (30, 3)),
    ({"prompt_tokens": 12, "completion_tokens": 33, "total_tokens": 45, "completion_tokens_details": {"reasoning_tokens": 30}}, 12, (30, 3)),
])
def test_tokens_that_a_server_counts_beside_the_others_are_added(serve, figures, prompt, produced):
    events = list(talk(serve(stream(chunk("ok") + STOP + usage(**figures) + DONE))).ask("hi"))
    assert mm.counted_tokens(figures, None)[0] == prompt and events[-1]["tokens"] == produced


@pytest.mark.parametrize("provider, limits, stalls", [("ollama", {}, False), ("llamacpp", {}, True), ("ollama", {"watchdogTimeout": 0.2}, True)])
def test_the_silence_while_a_call_is_written_is_bounded_by_the_first_tokens_limit(serve, box, provider, limits, stalls):
    server = serve(stream(chunk(reasoning="I write"), 0.6, call(index=0, id="a", name="list_files", arguments="{}") + chunk(finish="tool_calls")), stream(OK))
    settings = settings_of(firstTokenTimeout=5.0, **limits)
    settings.values["watchdogTimeout"] = 0.2
    conversation = mm.Conversation(backend_of(provider, server.url), settings, box("y"))
    assert bool(error(ask(conversation))) == stalls


@pytest.mark.parametrize("status, words", [
    (500, "tools param requires --jinja flag"), (400, "Unrecognized request argument supplied: tools"),
    (400, "tools is not supported by this model"), (404, "No endpoints found that support tool use."), (400, "m does not support tools"),
])
def test_a_server_that_refuses_tools_is_asked_without_them(serve, box, status, words):
    server = serve(reply(status, {"error": {"message": words}}), stream(OK))
    events = ask(agent(server, box("y")))
    assert text(events) == "ok" and "tools" not in server.arrived(2).body
    assert ["without tools" in event["message"] for event in events if event["type"] == "notice"] == [True]


def test_a_model_that_the_server_does_not_have_is_told_of(serve):
    missing = reply(404, {"error": {"message": "model 'qwen3' not found"}})
    for script, name in ((missing, "qwen3"), (stream(OK), "qwen3:0.5b")):
        server = serve(script)
        server.models = {"data": [{"id": "qwen3:0.6b"}, {"id": "m"}]}
        conversation = talk(server, "ollama")
        conversation.backend.model = name
        events = ask(conversation)
        told = [event["message"] for event in events if event["type"] in ("error", "notice")]
        assert len(told) == 1 and f"{name} is not among the server's models" in told[0] and "qwen3:0.6b" in told[0]


# -- whose key goes where

@pytest.mark.parametrize("values, environ, goes", [
    ({"provider": "-p"}, {}, False), ({"provider": "config.yaml: provider"}, {}, False), ({"provider": "session x"}, {}, False),
    ({"provider": "$MM_PROVIDER"}, {}, True), ({"provider": "-p", "url": "--url"}, {}, True),
])
def test_a_key_goes_to_its_providers_url_or_where_a_person_sends_it(values, environ, goes):
    notices = []
    settings = settings_of(provider="openai", url="http://box:9/v1")
    settings.sources.update({"url": "$MM_BASE_URL", **values})
    backend, = mm.candidates(settings, notices.append)
    assert (backend.url == "http://box:9/v1") == goes and len(notices) == (not goes)


def test_a_search_for_a_server_shows_no_key_unless_one_insists(serve, monkeypatch):
    monkeypatch.setenv("MM_API_KEY", "sk-k1")
    free, closed = serve(stream(OK)), serve(stream(OK))
    for server, refuses in ((free, False), (closed, True)):
        def take(sock, server=server, real=server.take, refuses=refuses):
            script = real(sock)
            return reply(401) if refuses and "authorization" not in server.gets[-1].headers else script
        server.take = take
        row = {"url": server.url, "local": True, "apiKeyEnv": "MM_API_KEY"}
        monkeypatch.setattr(mm, "PROVIDERS", {"box": row})
        settings = settings_of()
        backend = mm.resolve(settings, mm.candidates(settings, print), print)
        assert backend.key == "sk-k1" and "sk-k1" not in str(server.gets[0].headers)


def test_a_dummy_key_blots_nothing_out_and_a_token_in_a_url_is_never_shown(serve, run_mm):
    refusal = reply(400, {"error": {"message": "none of it: tok3n-9 is no ollama"}})
    server = serve(refusal)
    assert "none of it" in run_mm(*at(server), "hi", env={"MM_API_KEY": "none"}).err
    url = server.url.replace("http://", "http://tok3n-9@")
    assert "tok3n-9" not in said(run_mm("--url", url, "-m", "m", "hi"))


# -- surroundings

@pytest.mark.parametrize("script, args", [(reply(400, {"error": {"message": "no"}}), []), (None, ["--url", "http://127.0.0.1:9/v1"])])
def test_a_question_that_no_server_took_is_not_stored(serve, run_mm, folder, script, args):
    server = serve(stream(OK))
    run_mm(*at(server), "the first")
    run_mm(*(args or at(serve(script))), "-m", "m", "the refused one")
    assert len(list(folder.glob("*"))) == 1
    assert run_mm("-c", "and?").code == 0 and "the first" in str(server.arrived(2).body)


def test_in_one_pipe_the_answers_last_line_ends_before_notices(serve, run_mm):
    result = run_mm(*at(serve(stream(chunk("half") + CUT))), "--stats", "hi", redirect="2>&1")
    lines = result.out.split("\n")
    assert lines[0] == "half" and lines[1].startswith("mm: the answer is cut")


def test_a_binary_file_is_refused_before_anything_is_sent(serve, run_mm, tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 8)
    server = serve(stream(OK))
    result = run_mm(*at(server), "-f", "a.bin", "hi")
    assert result.code == 2 and "a.bin" in result.err and result.err.count("\n") == 1 and not server.posts


def test_a_dumb_terminal_gets_no_escape_sequence(serve, terminal):
    screen = terminal(*at(serve(stream(OK))), env={"TERM": "dumb"})
    screen.prompt()
    screen.send("hi\r")
    screen.expect("ok")
    screen.prompt()
    screen.send("\x04")
    assert screen.code() == 0 and "\x1b" not in screen.shown


def test_a_command_that_ran_into_its_limit_did_not_succeed(box):
    ok, output = use(box("y", seconds=0.2), "run_command", command="echo begun; sleep 9")
    assert not ok and "begun" in output and "time limit" in output


# ======================================================================================================================
# 14. The command line
# ======================================================================================================================

@pytest.mark.parametrize("words, stdin, redirect, asked", [
    (["why", "is", "it?"], None, "", "why is it?"), (["sum up"], "line 1\nline 2\n", "", "sum up\n\nline 1\nline 2"),
    ([], "only stdin\n", "", "only stdin"), (["hi"], "", "", "hi"), (["hi"], " \n\n", "", "hi"), (["hi"], None, "<&-", "hi"),
    (["hi"], None, "</dev/null", "hi"), (["hi"], b"\xef\xbb\xbfcaf\xc3\xa9", "", "hi\n\ncafé"),
    (["hi"], b"caf\xe9", "", "hi\n\ncaf\ufffd"), (["hi"], b"a\0b", "", "hi\n\na\ufffdb"),
    (["hi"], "größe".encode("utf-16"), "", "hi\n\ngröße"), ([b"caf\xe9 \xc3\xa9"], None, "", "caf\ufffd \u00e9"),
    (["--", "-x is what?"], None, "", "-x is what?"), (["why", "-q", "is", "it?"], None, "", "why is it?"), 
    pytest.param([], "x" * 200000, "", "x" * 200000, id="long"),
])
def test_the_question_is_made_of_words_and_stdin(serve, run_mm, words, stdin, redirect, asked):
    server = serve(stream(OK))
    result = run_mm(*at(server), *words, stdin=stdin, redirect=redirect)
    assert (result.code, result.out) == (0, "ok\n")
    assert question(server) == asked
    assert ("UTF-8" in result.err) == (isinstance(stdin, bytes) and "\ufffd" in asked)


def test_files_are_added_named_and_fenced(serve, run_mm, tmp_path):
    (tmp_path / "a.txt").write_text("alpha\n")
    (tmp_path / "b.md").write_text("```\ncode\n```\n")
    (tmp_path / "c.bin").write_bytes(b"caf\xe9")
    server = serve(stream(OK))
    result = run_mm(*at(server), "-f", "a.txt", "--file", "b.md", "-f", "c.bin", "compare", stdin="piped")
    asked = question(server)
    parts = ["compare", "a.txt", "alpha", "b.md", "````\n```\ncode\n```\n````", "c.bin", "caf\ufffd", "piped"]
    places = [asked.index(part) for part in parts]
    assert places == sorted(places) and "c.bin" in result.err


def test_no_question_at_all_is_wrong_usage(serve, run_mm):
    server = serve(stream(OK))
    for stdin in ("", "\n"):
        result = run_mm(*at(server), stdin=stdin)
        assert (result.code, result.err.count("\n"), len(server.posts)) == (2, 1, 0)


def test_the_system_prompt_is_sent_and_an_empty_one_unsets_the_config_s(serve, run_mm, tmp_path):
    (tmp_path / "c.yaml").write_text("system: from the file\n")
    server = serve(stream(OK))
    for option in ([], ["-s", "be kind"], ["-s", ""]):
        run_mm("--config", "c.yaml", *at(server), *option, "--no-save", "--max-steps", "3", "hi")
    assert [post.body["messages"][:-1] for post in server.posts] == [
        [{"role": "system", "content": "from the file"}], [{"role": "system", "content": "be kind"}], []]


def test_what_packages_warn_programmers_of_is_not_for_a_user(serve, run_mm, tmp_path):
    (tmp_path / "chardet.py").write_text('__version__ = "99.0.0"')
    result = run_mm(*at(serve(stream(OK))), "hi", env={"PYTHONPATH": str(tmp_path)})
    assert (result.code, result.out, result.err) == (0, "ok\n", "")


def test_blank_variables_are_the_same_as_none(serve, run_mm):
    blank = dict.fromkeys("MM_PROVIDER MM_MODEL MM_API_KEY MM_CONFIG XDG_CONFIG_HOME XDG_STATE_HOME http_proxy HOME".split(), "")
    server = serve(stream(OK))
    result = run_mm("hi", env={**blank, "MM_BASE_URL": f" {server.url} "})
    assert (result.code, result.out) == (0, "ok\n") and "authorization" not in server.arrived().headers


def test_check_says_what_would_be_used_and_whether_it_answers(serve, run_mm, tmp_path):
    (tmp_path / "c.yaml").write_text("model: n\n")
    server = serve(models=["m", "n"])
    result = run_mm("--check", "--url", server.url, "--config", "c.yaml")
    assert result.code == 0 and not server.posts
    assert all(token in result.out for token in (server.url, "n", "2 model", "c.yaml", "MM_API_KEY"))
    server.close()
    result = run_mm("--check", "--url", server.url, "-m", "zzz")
    assert result.code == 1 and server.url in result.out and "zzz" in result.out


def test_models_lists_the_server_s_models(serve, run_mm):
    server = serve(models=["m", "n"])
    result = run_mm("--models", "--url", server.url)
    assert (result.code, result.out) == (0, "m\nn\n")
    server.close()
    result = run_mm("--models", "--url", server.url)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("script, code", [
    (stream(OK), 0), (reply(500), 1), (stream(HALF), 1), (stream(STOP), 1), (stream(chunk(reasoning="a") + CUT), 1),
    (stream(chunk("cut") + CUT), 0),
])
def test_the_exit_code_says_whether_there_is_an_answer(serve, run_mm, script, code):
    result = run_mm(*at(serve(script)), "--retries", "0", "hi")
    assert result.code == code and (code == 0 or result.err.count("\n") >= 1)


def test_limits_of_the_command_line_reach_the_watchdog(serve, run_mm):
    result = run_mm(*at(serve(stream(chunk("a"), "hang"))), "--watchdog", "0.3", "--json", "hi")
    assert (result.code, kinds(result.events), result.events[1]["kind"]) == (1, ["answer", "error", "done"], "stalled")
    assert run_mm(*at(serve(["hang"])), "--first-token", "0.3", "--json", "hi").events[0]["kind"] == "stalled"


@pytest.mark.parametrize("args, code", [(["--version"], 0), (["hi"], 0), (["-i", "hi"], 0), (["--retries", "x", "hi"], 2)])
def test_the_script_and_the_launcher_do_the_same(serve, start_mm, program, args, code):
    results, server = [], serve(stream(OK))
    for path in (program, program + ".py"):
        process = start_mm(*args, env={"MM_BASE_URL": server.url, "MM_MODEL": "m"}, program=path)
        results.append((*process.communicate(timeout=PATIENCE), process.returncode))
    assert results[0] == results[1] and results[0][2] == code
    assert args != ["--version"] or results[0][0].decode().split() == ["mm", mm.__version__]


@pytest.mark.parametrize("ending", ["", ".py"])
def test_ctrl_c_while_mm_is_loading_ends_it_quietly(start_mm, program, tmp_path, ending):
    (tmp_path / "queue.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = start_mm("hi", env={"PYTHONPATH": str(tmp_path)}, program=program + ending)
    assert process.communicate(timeout=PATIENCE) == (b"", b"") and process.returncode == -signal.SIGINT


def table(title):
    """The rows of the first table of README.md below a heading, as lists of cells."""
    rows = document("README.md").split(f"# {title}\n")[1].split("\n|---")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def words(text):
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def test_every_option_is_in_the_help_and_in_the_readme_and_no_other(run_mm):
    known = {option for action in mm.parser()._actions for option in action.option_strings}
    shown = {word.split()[0] for word in words(document("README.md").split("## Settings")[1].split("### Servers")[0]) if word[0] == "-"}
    helped = set(re.findall(r"(?m)(?<![\w-])--?[a-zA-Z][a-z-]*", run_mm("--help").out.split("options:")[-1]))
    longest = {max(action.option_strings, key=len) for action in mm.parser()._actions if action.option_strings}
    assert shown <= known and {option for option in known if len(option) == 2 or option in longest} <= helped
    told = {max(action.option_strings, key=len) for action in mm.parser()._actions if shown & set(action.option_strings)}
    assert longest - told == {"--help"}


def test_every_setting_stands_with_its_option_variable_and_default_in_the_readme():
    rows = {}
    for option, variable, key, default, _ in table("Settings"):
        options, keys = words(option), words(key)
        name = next(n for n, row in mm.SETTINGS.items() if keys[:1] == [n] or {word for word in " ".join(options).split() if word[0] == "-"} & set(row[3].replace(",", "").split()))
        rows[name] = (options, words(variable), keys, default)
    assert set(rows) >= set(mm.SETTINGS) - {"providers"}
    for name, (options, variables, keys, default) in rows.items():
        _, value, variable, option, _ = mm.SETTINGS[name]
        assert variables == ([variable] if variable else []) and (keys == [name] or name in ("url", "think"))
        assert {word for word in option.replace(",", "").split() if word[0] == "-"} <= set(" ".join(options).split()), name
        if isinstance(value, (bool, int, float)) and value:
            assert default == (str(value).lower() if isinstance(value, bool) else f"{value:g}"), name


def test_the_example_of_a_config_file_shows_every_key_with_its_default(load):
    shown = document("config.example.yaml")
    settings = load(shown)
    assert settings.notices == [] and all(settings[key] == mm.SETTINGS[key][1] for key in mm.FILE_KEYS)
    uncommented = load(re.sub(r"(?m)^# ( *[\w-]+:)", r"\1", shown))
    assert uncommented.notices == [] and set(uncommented.sources) == set(mm.FILE_KEYS)
    assert {key for entry in uncommented["providers"].values() for key in entry} == set(mm.PROVIDER_KEYS)


def test_every_event_and_kind_of_error_is_in_the_readme():
    told = {name: words(fields.partition(":")[0] if name == "retry" else fields) for names, fields in table("Events: `--json`") for name in words(names)}
    assert set(told) == set(mm.EVENTS)
    for name, fields in mm.EVENTS.items():
        assert [word for word in told[name] if word in fields] == list(fields), name
    raised = set(re.findall(r'MMError\(\s*"(\w+)"', document("mm.py"))) | {kind for _, _, kind, _, _ in mm.HINTS}
    assert raised == set(told["error"]) - {"kind", "message"}


def test_every_key_of_a_provider_stands_with_its_default_in_the_readme():
    rows = {words(key)[0]: default for key, default, _ in table("Servers of your own")}
    assert list(rows) == list(mm.PROVIDER_KEYS)
    assert all(words(rows[key]) == [default] for key, default in [("protocol", mm.ENTRY_DEFAULTS["protocol"]), ("apiKeyEnv", mm.ENTRY_DEFAULTS["apiKeyEnv"])])
    assert rows["thinkTags"] == str(mm.ENTRY_DEFAULTS["thinkTags"]).lower() and next(iter(mm.TEMPLATES)) in rows["template"]


def test_every_provider_is_in_the_readme_with_its_url_and_how_it_is_started():
    rows = table("Servers")
    assert [name for row in rows for name in words(row[0])] == list(mm.PROVIDERS)
    for names, url, start, _ in rows:
        for name in words(names):
            entry = mm.PROVIDERS[name]
            assert words(url) == ([entry["url"]] if entry.get("local") else [])
            assert not entry.get("local") or re.findall(r"(?:^| )([a-z-]+)", entry["start"])[0] in start
    assert all(name in mm.parser().epilog for name in mm.PROVIDERS)


def test_the_docstring_lists_the_sections_that_there_are():
    listed = [int(number) for number in re.findall(r"(?m)^ +(\d+) [a-z]", mm.__doc__)]
    assert listed == [int(number) for number in re.findall(r"(?m)^# (\d+)\. ", document("mm.py"))] == list(range(15))
    path = re.findall(r"[\w.]+", mm.__doc__.split("The path of a token")[1].split("Sections")[0])
    assert {"Connection", "body_pieces", "Tap", "iter_lines", "events", "deltas", "split_thinking", "ModelCall", "read_reply"} <= set(path)
    assert all(hasattr(mm, name) for name in ("Connection", "body_pieces", "Tap", "events", "deltas", "split_thinking", "ModelCall", "read_reply"))


# ======================================================================================================================
# Proof: every fault at every point, in every view (make matrix); mangled streams (make fuzz); long runs (make endurance)
# ======================================================================================================================

QUESTION = "the question of the matrix"
BEGUN = sse({"prompt_progress": {"total": 9, "cache": 0, "processed": 3}, "choices": []})
LOOKED_UP = call(index=0, id="a", name="hold", arguments='{"how": "short"}') + chunk(finish="tool_calls") + DONE
MUCH = "w " * 1950  # more than the disk that fills can hold; a summary may be half as long
POINTS = {  # where a fault strikes: what the server has said by then
    "connecting": [],
    "before the headers": [],
    "reading the prompt": [HEAD + b"\r\n", BEGUN],
    "thinking": [HEAD + b"\r\n", BEGUN + chunk(reasoning="hm")],
    "answering": [HEAD + b"\r\n", BEGUN + chunk(reasoning="hm") + HALF],
    "in a call's arguments": [HEAD + b"\r\n", BEGUN + call(index=0, id="a", name="hold", arguments='{"how": "sh')],
    "between two calls": [],
    "in a tool": [HEAD + b"\r\n", LOOKED_UP.replace(b"short", b"long")],
    "summing up": [HEAD + b"\r\n", chunk("the sum")],
    "saving": [HEAD + b"\r\n", BEGUN + HALF],
}
STREAMING = ("reading the prompt", "thinking", "answering", "in a call's arguments", "summing up")
ASKED = ("before the headers", "between two calls")
SIGNALLED = ("connecting", *ASKED, *STREAMING, "in a tool", "saving")
FAULTS = {  # what breaks: where it can, what the server does then, the kind of the error
    "refused": (("connecting",), [], "unreachable"),
    "reset": ((*ASKED, *STREAMING), ["reset"], "interrupted"),
    "silence": (("connecting", *ASKED, *STREAMING), ["hang"], "stalled"),
    "half a line": (STREAMING, [b'data: {"choices": [{"del'], "interrupted"),
    "an error event": (STREAMING, [LOST], "server"),
    "garbage": ((*ASKED, *STREAMING), [b"\x00\xff\xfe{\r\n\r\ndata: {oops\n\n"], "protocol"),
    "a 500": (ASKED, reply(500, {"error": {"message": "slot lost"}}), "server"),
    "a trickle": (("reading the prompt", "thinking", "answering", "summing up"), [step for _ in range(4) for step in (chunk(reasoning="so "), 0.12)] + [OK], ""),
    "SIGINT": (SIGNALLED, ["hang"], "cancelled"),
    "SIGTERM": (SIGNALLED, ["hang"], ""),
    "SIGKILL": (SIGNALLED, ["hang"], ""),
    "a closed pipe": (("thinking", "answering"), [0.3, chunk(reasoning="so "), 0.05, chunk("more "), 0.05, chunk("more "), 0.05, OK], ""),
    "a full disk": (("saving", "between two calls", "summing up"), [OK], ""),
    "a disk that fills": (("saving", "between two calls", "summing up"), [chunk(MUCH) + OK], ""),
}
VIEWS = ("terminal", "pipe", "json", "repl")
MATRIX = [(view, fault, point) for fault, (points, _, _) in FAULTS.items() for point in points for view in VIEWS
          if not (fault == "a closed pipe" and view not in ("pipe", "json"))]


class Faulty(Server):
    """A server that breaks at one point until it is `healed`; `reached` is set when it is there."""

    def __init__(self, fault, point):
        self.fault, self.point, self.healed, self.reached = fault, point, False, threading.Event()
        super().__init__()

    def script(self, request, place):
        messages = request.body["messages"]
        summing = messages[-1]["content"].startswith(mm.SUMMARY[:20])
        if self.healed or self.point == "summing up" and not summing:
            return stream(OK)
        if self.point == "between two calls" and messages[-1]["role"] != "tool":
            return stream(LOOKED_UP.replace(b"short", b"much") if self.fault == "a disk that fills" else LOOKED_UP)
        steps, then = POINTS[self.point], FAULTS[self.fault][1]
        if summing and self.fault == "a disk that fills":
            then = [chunk(MUCH[:1900]) + OK]
        if self.point == "in a tool" or self.point == "saving" and then == ["hang"]:
            then = [OK]
        if not steps and then in ([OK], [chunk(MUCH) + OK]):
            steps, then = [HEAD + b"\r\n"], [OK]
        return [*steps, self.reached.set, *then]

    def wait_until_reached(self):
        assert self.reached.wait(PATIENCE)


class Deaf:
    """A server whose queue of connections is full, so that nobody gets through to it. Linux."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.queue = [socket.socket() for _ in range(3)]
        for sock in self.queue:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", self.port))
        self.waiting = self.dialling()

    def dialling(self):
        """How many connections to it are being made (state 02 is SYN_SENT)."""
        with open("/proc/net/tcp") as file:
            return sum(row.split()[2:4] == [f"0100007F:{self.port:04X}", "02"] for row in file)

    def wait_until_reached(self):
        deadline = time.monotonic() + PATIENCE
        while self.dialling() <= self.waiting:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self):
        for sock in (self.listener, *self.queue):
            sock.close()


def prepared(tmp_path, server, fault, point):
    """The arguments of mm for a case, its files made."""
    hold = f"case {{how}} in long) touch {tmp_path}/held; sleep 60.{server.port};; much) echo {MUCH};; esac; echo looked"
    (tmp_path / "c.json").write_text(json.dumps({
        "contextWindow": 400 if point == "summing up" else 100_000, "watchdogTimeout": 0.4, "firstTokenTimeout": 0.4,
        "tools": [] if point == "connecting" else ["hold"],  # with tools, the server is asked about them first
        "commands": {"hold": {"description": "looks", "command": ["sh", "-c", hold], "parameters": {
            "type": "object", "properties": {"how": {"type": "string", "enum": ["short", "long", "much"]}}}}}}))
    if point == "summing up":
        folder = tmp_path / ".local/state/mm/sessions"
        folder.mkdir(parents=True)
        rows = [{"session": 1}, {"role": "user", "content": "before"}, {"role": "assistant", "content": "w " * 1000}]
        (folder / "20200101-000000-aaaa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = "http://127.0.0.1:1/v1" if fault == "refused" else server.url
    return ["--config", "c.json", "-p", "llamacpp", "--url", url, "-m", "m", "-y", *(["-c"] if point == "summing up" else [])]


def kept(tmp_path):
    """The history that is on disk."""
    paths = sorted((tmp_path / ".local/state/mm/sessions").glob("*.jsonl"))
    return mm.load_session(str(paths[-1]))[1] if paths else []


def strike(fault, process, tmp_path, server, point):
    """Waits until mm is at the point, and does what comes from outside."""
    if not fault.startswith("SIG"):
        return
    server.wait_until_reached()
    deadline = time.monotonic() + PATIENCE
    while point == "in a tool" and not (tmp_path / "held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if point in STREAMING:
        time.sleep(0.05)  # what was said is on its way
    process.send_signal(getattr(signal, fault))


def running(command):
    """Whether a process runs that command. Linux."""
    return any(command in pathlib.Path(path).read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
               for path in glob.glob("/proc/[0-9]*/cmdline") if os.path.exists(path))


LIMITS = {"a full disk": "ulimit -f 0;", "a disk that fills": "ulimit -f 6;"}  # blocks of 512 bytes


def codes_of(fault, point, view):
    """The exit codes that a case may end with."""
    if fault in ("SIGTERM", "SIGKILL"):
        codes = {143 if fault == "SIGTERM" else -9}
    elif view == "repl" or fault == "a trickle" or fault in LIMITS or point == "summing up" and fault != "SIGINT":
        codes = {0}
    elif fault == "a closed pipe" and point == "thinking" and view == "pipe":
        codes = {0}  # the thinking goes to stderr, which nobody needs
    else:
        codes = {130 if fault == "SIGINT" else 1}
    return codes | ({0} if point == "saving" else set())  # a signal may come when all is done


def is_taken(fault, point):
    """Whether the server took the question; one that it refused is not kept."""
    return fault != "refused" and not (fault in ("garbage", "a 500") and point == "before the headers")


def in_terminal(terminal, args, view, fault, point, server, tmp_path):
    screen = terminal(*args, *([] if view == "repl" else [QUESTION]), prelude=LIMITS.get(fault, ""))
    if view == "repl":
        screen.prompt()
        screen.send(QUESTION + "\r")
    strike(fault, screen.process, tmp_path, server, point)
    if view == "repl" and (fault not in ("SIGTERM", "SIGKILL") or screen.process.poll() == 0):
        screen.expect("> ")
        while screen.take(0.3):
            pass
        screen.read, server.healed = len(screen.shown), True
        if point == "connecting":  # it goes on, though nobody is there
            screen.send("/model\r")
            screen.expect("model: m")
            screen.prompt()
        else:
            screen.send("and then?\r")
            screen.expect("ok")
            screen.prompt()
            strict(server.posts[-1])
            if point != "summing up":  # else it is summed up by now
                assert (QUESTION in json.dumps(server.posts[-1].body)) == is_taken(fault, point)
        screen.send("\x04")
    code = screen.code()
    assert "Traceback" not in screen.shown
    if fault != "SIGKILL":
        assert termios.tcgetattr(screen.slave) == screen.attributes
    return code, screen.shown, []


def in_pipes(start_mm, args, view, fault, point, server, tmp_path):
    process = start_mm(*args, *(["--json"] if view == "json" else []), QUESTION, prelude=LIMITS.get(fault, ""))
    if fault == "a closed pipe":
        server.wait_until_reached()
        closed, other = (process.stderr, process.stdout) if point == "thinking" and view == "pipe" else (process.stdout, process.stderr)
        closed.close()
        err = other.read()
    strike(fault, process, tmp_path, server, point)
    shown, events = b"", []
    if fault != "a closed pipe":
        shown, err = process.communicate(timeout=PATIENCE)
    code = process.wait(PATIENCE)
    assert b"Traceback" not in err and b"Exception ignored" not in err
    if view == "json" and fault not in ("SIGKILL", "SIGTERM", "a closed pipe"):
        events = [json.loads(line) for line in shown.decode().splitlines()]
        assert events[-1]["type"] == "done"
    return code, shown.decode() + err.decode(), events


@pytest.mark.matrix
@pytest.mark.parametrize("view, fault, point", MATRIX)
def test_whatever_breaks_wherever_nothing_is_lost(start_mm, terminal, tmp_path, view, fault, point):
    server = Deaf() if point == "connecting" and fault != "refused" else Faulty(fault, point)
    try:
        args = prepared(tmp_path, server, fault, point)
        run = in_terminal if view in ("terminal", "repl") else in_pipes
        code, shown, events = run(start_mm if run is in_pipes else terminal, args, view, fault, point, server, tmp_path)
        assert code in codes_of(fault, point, view), shown
        kinds_told = [event["kind"] for event in events if event["type"] == "error"]
        expected = FAULTS[fault][2] if point != "summing up" or fault == "SIGINT" else ""
        if events and not (point == "saving" and code == 0):
            assert kinds_told == ([expected] if expected else [])
        folder = tmp_path / ".local/state/mm/sessions"
        files = list(folder.iterdir()) if folder.exists() else []
        is_kept = is_taken(fault, point)
        assert any(QUESTION in path.read_text() for path in files) == (is_kept and fault != "a full disk")
        if not is_kept and not files:
            return
        history = kept(tmp_path)
        if fault in LIMITS:
            assert "not saved" in shown and all(path.stat().st_size <= 6 * 512 for path in files)
            return
        assert point != "between two calls" or any(message["role"] == "tool" and "looked" in message["content"] for message in history)
        if point == "answering" and fault not in ("SIGKILL", "a trickle", "a closed pipe"):
            assert any(message["role"] == "assistant" and "half" in message["content"] for message in history)
        strict(SimpleNamespace(body={"messages": mm.to_messages([*history, user("and then?")], "")}))
        assert point != "in a tool" or fault == "SIGKILL" or not running(f"sleep 60.{server.port}")
    finally:
        server.close()


@pytest.mark.matrix
def test_the_readme_tells_the_size_of_the_matrix():
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        assert f"{len(FAULTS)} faults at {len(POINTS)} points in {len(VIEWS)} views, {len(MATRIX)} cases" in " ".join(file.read().split())


WHOLE = [  # streams as servers send them, to be mangled
    BEGUN + chunk(reasoning="hm ") * 5 + chunk("Né 😀 ") * 5 + STOP + usage(prompt_tokens=9, completion_tokens=10) + DONE,
    LOOKED_UP, call(index=0, id="a", name="f", arguments='{"a":') + call(index=1, id="b", name="f") + call(index=0, arguments="1}") + STOP + DONE,
    sse({"choices": [{"delta": {"reasoning": "a", "reasoning_content": "a", "reasoning_details": [{"text": "a"}]}}]}) + OK,
    b": ping\r\n\r\nevent: error\r\ndata: {\"error\": {\"message\": \"lost\", \"code\": 500}}\r\n\r\n",
    sse({"choices": [{"text": "<think>hm</think>ok", "index": 0, "finish_reason": "stop"}], "timings": {"predicted_n": 3, "predicted_ms": 2.5}}),
    json.dumps({"choices": [{"message": {"content": "ok", "reasoning_content": "hm", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]},
                             "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 3}}).encode(),
    gzip.compress(OK * 3), b"<!doctype html><title>Gate</title>", b'{"error": {"message": "context size (9) exceeded", "n_ctx": 9}}',
    b'{"detail": [{"loc": ["body", "x"], "msg": "no"}]}', chunk("a\\ud83d") + chunk("\\ude00b") + STOP,
]
ODD = [None, True, -1, 0, 1e308, 10 ** 400, "", "\ud800", [], {}, [[]], [None], {"text": None}, "x" * 5000, [{"index": -5}], float("nan"), {"message": {}}]
SHARDS = [b"\r", b"\n\n", b"\r\n", b"\0", b"\xff\xfe", b"data:", b"data: [DONE]", b"event: error", b":", b'"', b"}", b"[" * 2000, b'{"a":' * 300,
          b"\\ud800", b"9" * 5000, b"1e999", b"NaN", b"<think>", b"</think>", b"\x1f\x8b", b"x" * 20000, "\u2028".encode(), b"\xef\xbb\xbf", b"\x1b[2J"]


def mangled(random, streams):
    """A stream that no server should send, in pieces."""
    raw = random.choice(streams)
    for _ in range(random.randrange(4)):
        place, other = random.randrange(len(raw) + 1), random.choice(streams)
        end = min(len(raw), place + random.randrange(40))
        raw = random.choice([
            lambda: raw[:place], lambda: raw[:place] + raw[end:], lambda: raw[:place] + random.choice(SHARDS) + raw[place:],
            lambda: raw[:place] + random.choice(SHARDS) + raw[end:], lambda: raw[:place] + other[random.randrange(len(other)):],
            lambda: raw[:place] + raw[place:end] * random.randrange(1, 50) + raw[end:],
            lambda: raw[:place] + bytes(random.randrange(256) for _ in range(3)) + raw[end:], lambda: oddly(raw, random)])()
    cuts = sorted(random.randrange(len(raw) + 1) for _ in range(random.choice([0, 1, 5, 50])))
    return [piece for piece in (raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])) if piece]


def oddly(raw, random):
    """`raw` with one value in the JSON of one of its events replaced, or its key."""
    events = raw.split(b"\n\n")
    place = random.randrange(len(events))
    try:
        value = json.loads(events[place].partition(b"data: ")[2])
        node = value
        while True:
            key = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or random.random() < 0.2:
                node[key] = random.choice(ODD)
                break
            node = node[key]
    except (ValueError, IndexError, TypeError, RecursionError):
        return raw
    events[place] = b"data: " + json.dumps(value).encode()
    return b"\n\n".join(events)


def survive(seed, streams=WHOLE):
    """Plays the mangled stream of a seed: no exception, an ending event, figures and a history that can be used."""
    random = Random(seed)
    pieces, settings = mangled(random, streams), settings_of(retries=0, compactAt=0, reasoningEcho=True)
    conversation = mm.Conversation(backend_of(random.choice(["", "llamacpp", "ollama"])), settings)
    backend = conversation.backend
    backend.entry["thinkTags"] = random.choice([False, True, "open"])

    def stream(body, line, tap, notice):
        return mm.deltas(rows_of(pieces), backend, "http://box/v1")
    conversation.protocol.stream, conversation.settings.values["maxSteps"] = stream, 1
    events = list(conversation.ask("hi"))
    shown = [event for event in events if event["type"] in mm.EVENTS]
    assert shown[-1]["type"] == "done" and kinds(shown).count("done") == 1 and kinds(shown).count("error") < 2
    assert all("mm could not read" not in event["message"] for event in shown if event["type"] == "error")
    for event in shown:
        json.dumps({key: event[key] for key in mm.EVENTS[event["type"]] if key != "kind" or event["type"] == "error"}).encode()
    assert "answer" in kinds(shown) or "error" in kinds(shown) or any("kind" in event for event in shown) or "tool_call" in kinds(shown)
    mm.figures(shown[-1], 60)
    mm.serialised(mm.to_messages(conversation.history, "s"))


@pytest.mark.parametrize("seed", range(60))
def test_a_mangled_stream_ends_in_an_event(seed):
    survive(seed)


@pytest.fixture(scope="session")
def one_file(tmp_path_factory):
    """mm.pyz as `make mm.pyz` builds it, twice; -> the path of one."""
    built = []
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        for file in ("mm.py", "Makefile"):
            shutil.copy(os.path.join(HERE, file), folder)
        made = subprocess.run(["make", "-s", "mm.pyz", f"PYTHON={sys.executable}"], cwd=folder, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        built.append(folder / "mm.pyz")
    assert built[0].read_bytes() == built[1].read_bytes(), "not reproducible"
    return built[0]


@pytest.mark.pyz
def test_one_file_runs_where_nothing_is_installed(one_file, serve, tmp_path):
    assert one_file.stat().st_size < 3 << 20
    with zipfile.ZipFile(one_file) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".pyd", ".pyc"))]
    server = serve(stream(chunk("né ") + OK))
    (tmp_path / "mm.pyz").write_bytes(one_file.read_bytes())
    (tmp_path / "config.yaml").write_text(f"provider: box\nproviders: {{box: {{url: '{server.url}', model: m}}}}\n")  # beside the file
    before = set(os.listdir(tempfile.gettempdir()))
    for python in pythons():
        run = subprocess.run([python, "-I", "-S", str(tmp_path / "mm.pyz"), "-q", "hi"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert (run.returncode, run.stdout, run.stderr) == (0, "né ok\n", ""), python
    assert {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.endswith(".pem")} == set()


def pythons():
    """Every Python from 3.9 to 3.13 that is found on PATH or below ~/.pyenv, one each."""
    import pwd
    found = {}
    for minor in range(9, 14):
        name, home = f"python3.{minor}", pwd.getpwuid(os.getuid()).pw_dir
        known = sorted(glob.glob(f"{home}/.pyenv/versions/3.{minor}.*/bin/{name}")) + [shutil.which(name) or ""]
        works = (path for path in known if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0)
        found[minor] = next(works, "")
    return [path for path in found.values() if path] or [sys.executable]


@pytest.mark.fuzz
def test_ten_thousand_mangled_streams_end_in_an_event_each(request):
    """FUZZ_SEED=n begins at another seed, FUZZ_COUNT=n plays so many, FUZZ_FILES='DIR/**/*.sse' mangles recorded streams as well."""
    signal.alarm(0)
    begin, count = (int(os.environ.get(name, default)) for name, default in (("FUZZ_SEED", 1000), ("FUZZ_COUNT", 10_000)))
    paths = glob.glob(os.environ.get("FUZZ_FILES", ""), recursive=True)
    streams = WHOLE + [pathlib.Path(path).read_bytes() for path in paths if os.path.isfile(path) and os.path.getsize(path)]
    before, failed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for seed in range(begin, begin + count):
        try:
            survive(seed, streams)
        except Exception as error:  # every failing seed is told, not the first alone
            failed.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    assert not failed, "\n".join(failed[:20])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "KiB"


ENDLESS = {  # what a server sends without end, and the kind of the error that it becomes before memory is filled
    "a line": (lambda: itertools.repeat(b"x" * 60_000), "protocol"),
    "an event": (lambda: itertools.repeat(b"data: x\n" * 6000), "protocol"),
    "a body": (lambda: itertools.chain([b"["], itertools.repeat(b"1,\n" * 20_000)), "protocol"),
    "a call's arguments": (lambda: itertools.repeat(call(index=0, id="a", name="f", arguments="x" * 50) * 300), "protocol"),
    "calls": (lambda: (call(index=n, id=f"{n}", name="f") for n in itertools.count()), "protocol"),
    "comments": (lambda: itertools.repeat(b": ping\n\n" * 6000), "interrupted"),
    "fields that nobody knows": (lambda: itertools.repeat(b"what: ever\n" * 6000), "protocol"),
    "zeros in gzip": (lambda: itertools.repeat(gzip.compress(bytes(50 << 20))), "protocol"),
}


def read_endless(name):
    """Prints the error that 100 MB of an endless stream end in, and the peak of this process's memory in MiB."""
    def pieces():
        sent = 0
        for piece in ENDLESS[name][0]():
            sent += len(piece)
            if sent > 100e6:
                return
            yield piece
    calls = mm.Calls()
    try:
        for kind, value in mm.deltas(rows_of(pieces()), backend_of(), "http://box/v1"):
            if kind == "call":
                calls.add(value)
        ended = ""
    except mm.MMError as error:
        ended = error.kind
    print(ended, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_stream_becomes_an_error_before_it_fills_memory(name):
    code = f"import test_mm; test_mm.read_endless({name!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    kind, peak = run.stdout.split()
    assert kind == ENDLESS[name][1] and int(peak) < 200, f"{peak} MiB"


def test_two_conversations_in_two_threads_hear_nothing_of_each_other(serve):
    def echo(request, place):  # says back who asked, and with which key
        who = re.findall(r"I am (\w+)", request.body["messages"][-1]["content"])[0]
        return stream(chunk(reasoning=f"thought of {who} ") + chunk(f"hello {who}") + STOP + DONE)
    server, heard = serve(), {}
    server.script = echo

    def talk_as(who):
        conversation = mm.Conversation(backend_of("llamacpp", server.url, key=f"key-of-{who}"), settings_of(reasoningEcho=True, compactAt=0))
        for turn in range(100):
            events = ask(conversation, f"I am {who}, turn {turn}")
            assert (text(events), text(events, "reasoning"), error(events)) == (f"hello {who}", f"thought of {who} ", None)
        heard[who] = len(conversation.history)
    threads = [threading.Thread(target=talk_as, args=(who,)) for who in ("anna", "bert")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    assert heard == {"anna": 200, "bert": 200}
    for post in server.posts:
        mine, other = ("anna", "bert") if "anna" in post.headers["authorization"] else ("bert", "anna")
        assert post.headers["authorization"] == f"Bearer key-of-{mine}" and other not in json.dumps(post.body)


@pytest.mark.endurance
def test_a_thousand_turns_with_stalls_and_retries_leave_nothing_behind(start_mm, serve, tmp_path):
    signal.alarm(0)
    asked = [0]

    def moody(request, place):
        asked[0] += 1
        body = request.body["messages"][-1]["content"]
        if body.startswith(mm.SUMMARY[:20]):
            return stream(chunk("what was said") + STOP + DONE)
        told = usage(prompt_tokens=len(json.dumps(request.body)) // 4, completion_tokens=40)
        whole = stream(chunk(reasoning="hm ") + chunk("an answer of some words " * 6) + STOP + told + DONE)
        return {0: stream(HALF), 1: stream(HALF, "hang"), 2: stream(HALF, "reset"), 3: reply(503, {"error": "busy"}, Retry_After=0)}.get(asked[0] % 50, whole)
    server = serve()
    server.script = moody
    (tmp_path / "c.json").write_text(json.dumps({"contextWindow": 4000, "watchdogTimeout": 0.2}))
    process = start_mm("--config", "c.json", *at(server), "-i", "--json", stdin=b"", env={"MALLOC_ARENA_MAX": "1"})
    figures, prompts = [], []

    def look():
        base = f"/proc/{process.pid}"
        with open(f"{base}/status") as file:
            status = dict(line.split(":", 1) for line in file)
        return int(status["Threads"]), len(os.listdir(f"{base}/fd")), int(status["VmRSS"].split()[0])
    for turn in range(1000):
        process.stdin.write(f"question {turn}: what then?\n".encode())
        process.stdin.flush()
        while json.loads(process.stdout.readline())["type"] != "done":
            pass
        prompts.append(len(json.dumps(server.posts[-1].body)) // 4)
        if turn in (100, 400, 700, 999):
            figures.append(look())
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 1  # a stream that falls silent is not asked for again
    (threads, files, _), (_, _, memory), _, late = figures
    assert late[0] <= threads and late[1] <= files and late[2] < memory + 4 * 1024, figures
    assert max(prompts) < 4000


# ======================================================================================================================
# A real llama-server: make live LLAMA_URL="http://127.0.0.1:8080/v1 ..."
# ======================================================================================================================

LIVE_URLS = os.environ.get("LLAMA_URL", "").split()
HOW = "no LLAMA_URL: start `llama-server -m MODEL.gguf --port 8080`, then make live LLAMA_URL=http://127.0.0.1:8080/v1"


@pytest.fixture(params=LIVE_URLS or [""])
def llama(request):
    """The options that reach a real llama-server; its key is in LLAMA_KEY, more options (for a small model) in LLAMA_OPTIONS."""
    if not request.param:
        pytest.skip(HOW)
    return ["-p", "llamacpp", "--url", request.param, *shlex.split(os.environ.get("LLAMA_OPTIONS", ""))]


@pytest.fixture
def ask_llama(run_mm, llama):
    return lambda *args, **more: run_mm(*llama, *args, env={"MM_API_KEY": os.environ.get("LLAMA_KEY", "")}, **more)


@pytest.mark.live
def test_a_real_server_says_what_it_serves(ask_llama):
    result = ask_llama("--check")
    assert result.code == 0 and re.search(r"context\s+[\d,]+ tokens", result.out)


@pytest.mark.live
def test_a_real_answer_is_told_with_its_figures_and_replays_the_same(ask_llama, tmp_path):
    live = ask_llama("-o", "max_tokens=60", "--json", "--tap", str(tmp_path / "tap"), "Say hello.")
    done = live.events[-1]
    assert done["type"] == "done" and done["finish_reason"] in ("stop", "length") and done["timings"]["predicted_n"] > 0
    assert done["usage"]["completion_tokens"] > 0 and [e for e in live.events if e["type"] in ("reasoning", "answer")]
    again = ask_llama("--json", "--replay", str(tmp_path / "tap"))
    told = [[e for e in run.events if e["type"] in ("reasoning", "answer", "progress")] for run in (live, again)]
    assert told[0] == told[1] and again.events[-1]["usage"] == done["usage"]


@pytest.mark.live
def test_a_real_server_reads_only_what_is_new_from_the_second_question_on(ask_llama):
    text = "Here are some words: " + " ".join(f"word{n}" for n in range(60))
    result = ask_llama("-o", "max_tokens=12", "-i", "--json", stdin=f"{text}\nand now?\n")
    first, second = [e["timings"] for e in result.events if e["type"] == "done"]
    assert second["cache_n"] > 100 and second["prompt_n"] < first["prompt_n"] + first["cache_n"]


@pytest.mark.live
def test_a_raw_prompt_is_byte_for_byte_what_a_real_server_s_chatml_template_makes(llama):
    import requests
    url, headers = llama[3], {"Authorization": f"Bearer {os.environ.get('LLAMA_KEY', '')}"}
    history = [user("Name a river."), assistant("The Po.\n\n  It is in Italy."), user("né? <b>\n```x```")]
    messages = mm.to_messages(history, "Be brief.")
    answer = requests.post(url.replace("/v1", "/apply-template"), json={"messages": messages}, headers=headers, timeout=PATIENCE)
    if answer.status_code != 200 or "<|im_start|>" not in answer.json()["prompt"]:
        pytest.skip(f"{url} has no chatml template")
    prompt = answer.json()["prompt"]
    opened = mm.THINK_OPENED if prompt.endswith(mm.THINK_OPENED) else ""
    assert mm.as_prompt(messages, mm.TEMPLATES["chatml"]) + opened == prompt


@pytest.mark.live
def test_a_real_server_answers_a_raw_prompt(ask_llama, llama, tmp_path):
    (tmp_path / "c.yaml").write_text(f"providers: {{raw: {{like: llamacpp, url: '{llama[3]}', protocol: completions, template: chatml}}}}")
    result = ask_llama("--config", str(tmp_path / "c.yaml"), "-p", "raw", "--url", "", "-o", "max_tokens=30", "--no-think", "--json", "Say hello.")
    assert result.code == 0 and text(result.events) and result.events[-1]["timings"]["predicted_n"] > 0


@pytest.mark.live
def test_a_real_overflow_is_told_with_its_two_numbers(ask_llama):
    result = ask_llama("--json", stdin="word " * 40000)
    error = next(e for e in result.events if e["type"] == "error")
    assert error["kind"] == "overflow" and len(re.findall(r"\d[\d,]{3,}", error["message"])) == 2 and result.code == 1


@pytest.mark.live
def test_a_real_stream_that_is_left_frees_the_server_for_the_next(ask_llama, llama, terminal):
    screen = terminal(*llama, "-i", env={"MM_API_KEY": os.environ.get("LLAMA_KEY", "")})
    screen.expect("> ")
    screen.send("Count from 1 to 1000 in words.\n")
    while not {"💭", "🤖"} & set(screen.shown):
        assert screen.process.poll() is None
        screen.take()
    while "> " not in screen.shown[screen.read:]:  # the first one may only end the thinking, and a short answer may come by itself
        assert screen.process.poll() is None
        screen.send("\x03")
        screen.take(0.5)
    assert ask_llama("-o", "max_tokens=5", "--first-token", "20", "--json", "hi").events[-1]["finish_reason"] in ("stop", "length")


@pytest.mark.live
def test_another_implementation_of_the_protocol_is_understood(run_mm, tmp_path):
    url = os.environ.get("LLAMA_OTHER_URL", "")
    if not url:
        pytest.skip("no LLAMA_OTHER_URL: pip install 'llama-cpp-python[server]', then python -m llama_cpp.server --model MODEL.gguf --port 8000")
    assert run_mm("--url", url, "--models").out.strip()
    live = run_mm("--url", url, "-o", "max_tokens=20", "--json", "--tap", "tap", "Say hello.")
    assert live.code == 0 and text(live.events) and live.events[-1]["finish_reason"] in ("stop", "length")
    again = run_mm("--json", "--replay", "tap")
    told = [[event for event in run.events if event["type"] == "answer"] for run in (live, again)]
    assert told[0] == told[1]
    assert run_mm("--url", url, "-o", "max_tokens=5", "-i", "--json", stdin="one\ntwo\n").events[-1]["finish_reason"] in ("stop", "length")


# ======================================================================================================================
# Benchmarks: make bench, which runs this file as a program
#
# mm against curl -N, plain requests and the openai client, in one run: the contenders take turns, medians are shown, and the
# exit status is 0 whatever they are, since this measures and does not test. Linux only (wait4; one clock for all processes).
# ======================================================================================================================

PACED, BURST, OPENAI_BURST, LIMIT = 300, 200_000, 20_000, 40  # tokens per run; the most seconds that a run may take
WORDS = tuple(f"w{number} " if number % 16 else f"w{number}\n" for number in range(1000))
# Linux counts what a process was before exec into its peak RSS, so that a child's is never below its parent's. Hence a
# bare interpreter, smaller than anything measured, starts, times and reaps each command.
LAUNCHER = """import os, sys, time
null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
start = time.perf_counter()
status, usage = os.wait4(os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=null), 0)[1:]
print(status, time.perf_counter() - start, usage.ru_maxrss / 1024)"""
REQUESTS = """import json, sys, requests
headers = {"Content-Type": "application/json"}
with requests.post(sys.argv[1], data=sys.argv[2], headers=headers, stream=True) as reply:
    for line in reply.iter_lines():
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                sys.stdout.write(choice["delta"].get("content") or "")"""
OPENAI = """import sys, openai
client, asked = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0), [{"role": "user", "content": "hi"}]
for event in client.chat.completions.create(model=sys.argv[2], messages=asked, stream=True):
    if event.choices and event.choices[0].delta.content:
        sys.stdout.write(event.choices[0].delta.content)"""
Setup = collections.namedtuple("Setup", "url mm openai environ rounds llama")


def bench_frame(chunked, data):
    """`data`, as an HTTP chunk if chunked."""
    return b"%x\r\n%s\r\n" % (len(data), data) if chunked else data


def bench_event(chunked, delta, finish=None, **extra):
    """One SSE event as llama.cpp writes it; without a choice if delta is None."""
    choices = [] if delta is None else [{"finish_reason": finish, "index": 0, "delta": delta}]
    body = {"choices": choices, "created": 1796069821, "id": "chatcmpl-x", "model": "m", "system_fingerprint": "b0",
            "object": "chat.completion.chunk", **extra}
    return bench_frame(chunked, b"data: %s\n\n" % json.dumps(body, separators=(",", ":")).encode())


def bench_reply(kind, count, chunked):
    """The pieces of a reply as they are to be sent.

    short: thinking and `count` tokens at once; burst: `count` tokens as fast as they are taken; pace: one every 5 ms,
    its content the time at which it was sent.
    """
    yield bench_event(chunked, {"role": "assistant", "content": None})
    if kind == "pace":
        start = time.monotonic()
        for turn in range(count):
            time.sleep(max(0, start + turn * 0.005 - time.monotonic()))
            yield bench_event(chunked, {"content": "%020d " % time.monotonic_ns()})
    else:
        block = b"".join(bench_event(chunked, {"content": word}) for word in WORDS[:count])
        yield bench_event(chunked, {"reasoning_content": "hm "}) * 10 + block if kind == "short" else block
        for _ in range(count // len(WORDS) - 1):
            yield block
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    yield bench_event(chunked, {}, "stop") + bench_event(chunked, None, usage=usage) + bench_frame(chunked, b"data: [DONE]\n\n")
    yield bench_frame(chunked, b"")


class BenchHandler(BaseHTTPRequestHandler):
    """Serves what the name of the model that is asked for says: KIND-COUNT-TRANSPORT."""

    protocol_version, disable_nagle_algorithm, timeout = "HTTP/1.1", True, LIMIT

    def log_message(self, *args):
        """Nothing is logged."""

    def begin(self, *headers):
        self.send_response(200)
        for header in headers:
            self.send_header(*header)
        self.end_headers()

    def do_GET(self):
        body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
        self.begin(("Content-Type", "application/json"), ("Content-Length", str(len(body))))
        self.wfile.write(body)

    def do_POST(self):
        kind, count, transport = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"].split("-")
        chunked = transport == "chunked"
        try:
            self.begin(("Content-Type", "text/event-stream"),
                       ("Transfer-Encoding", "chunked") if chunked else ("Connection", "close"))
            for piece in bench_reply(kind, int(count), chunked):
                self.wfile.write(piece)
        except OSError:  # the client left
            self.close_connection = True


def bench_command(setup, who, model):
    """The command line with which a contender asks for a reply."""
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]})
    post = setup.url + "/chat/completions"
    return {"mm": [sys.executable, setup.mm, "--url", setup.url, "-m", model, "hi"],
            "curl": ["curl", "-sN", "-H", "Content-Type: application/json", "-d", body, post],
            "requests": [sys.executable, "-c", REQUESTS, post, body],
            "openai": [setup.openai, "-c", OPENAI, setup.url, model]}[who]


def bench_run(setup, line, use=lambda child: child.communicate(timeout=LIMIT)[0].decode()):
    """What use(child) makes of a command line that writes into a pipe: its output; nothing of it is left running."""
    child = subprocess.Popen(line, env=setup.environ, bufsize=0, start_new_session=True, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        return use(child)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.stdout.close()
        child.wait()


def bench_check(setup, line, count):
    """One unmeasured run: ValueError if it does not write what a short or burst reply of `count` tokens says."""
    text = bench_run(setup, line)
    if text.strip() != "".join((WORDS * -(-count // len(WORDS)))[:count]).strip():
        raise ValueError(f"wrong answer: {text[:40]!a}")


def bench_cost(setup, line):
    """(seconds, peak RSS in MiB) of a command line whose output goes to /dev/null."""
    status, seconds, peak = bench_run(setup, [sys.executable, "-ISc", LAUNCHER, *line]).split()
    if status != "0":
        raise ValueError(f"wait status {status}")
    return float(seconds), float(peak)


def token_delays(child):
    """(median, 99th percentile) in ms of the time from sending a token to reading it from the client's output."""
    end, rest, delays = time.monotonic() + LIMIT, b"", []
    while select.select([child.stdout], [], [], max(0, end - time.monotonic()))[0]:
        data, now = os.read(child.stdout.fileno(), 1 << 16), time.monotonic_ns()
        if not data:
            break
        *whole, rest = re.split(rb"(?<=\d{20}) ", rest + data)
        delays += [(now - int(part[-20:])) / 1e6 for part in whole]
    if len(delays) != PACED:
        raise ValueError(f"{len(delays)} of {PACED} tokens")
    return statistics.median(delays), sorted(delays)[PACED * 99 // 100]


def in_turn(rounds, measure, lines):
    """measure(line) of each command line in each round, every other round backwards; -> a list of results for each."""
    results = [[] for _ in lines]
    for turn in range(rounds):
        for index in range(len(lines))[::-1 if turn % 2 else 1]:
            results[index].append(measure(lines[index]))
    return results


def bench_row(name, shown, ours, theirs, mode, want):
    """The table row that compares medians. mode: "-" difference, "/" ratio, at most `want`; "*" ratio, at least `want`.

    noise: the spread of the baseline between rounds, from 8 rounds on without the highest and the lowest eighth.
    """
    mine, base, ordered = statistics.median(ours), statistics.median(theirs), sorted(theirs)
    spread = ordered[-1 - len(ordered) // 8] - ordered[len(ordered) // 8]
    value = mine - base if mode == "-" else mine / base
    met = value >= want if mode == "*" else value <= want
    result, noise = ("%+.2f", shown % spread) if mode == "-" else ("%.2fx", "%.0f%%" % (100 * spread / base))
    return (name, shown % mine, shown % base, result % value, (">= " if mode == "*" else "<= ") + str(want), noise,
            "met" if met else "NOT MET")


def delay_rows(setup, transport):
    """Token latency against curl -N."""
    lines = [bench_command(setup, who, f"pace-{PACED}-{transport}") for who in ("mm", "curl")]
    ours, theirs = in_turn(setup.rounds, lambda line: bench_run(setup, line, token_delays), lines)
    for name, want, mine, base in zip(("median", "p99"), (0.6, 5), zip(*ours), zip(*theirs)):
        yield bench_row(f"token delay, {name}, ms: curl -N, {transport}", "%.2f", mine, base, "-", want)


def burst_rows(setup, transport):
    """Throughput against openai's, each less its own short run; memory against the short run's."""
    plan = [("mm", BURST)] + [("openai", OPENAI_BURST)] * bool(setup.openai)
    for who, count in plan:
        bench_check(setup, bench_command(setup, who, f"burst-{count}-{transport}"), count)
    lines = [bench_command(setup, who, f"{job}-{transport}") for who, count in plan for job in (f"burst-{count}", "short-10")]
    runs = in_turn(min(3, setup.rounds), lambda line: bench_cost(setup, line), lines)
    rates = [[count / 1000 / max(1e-9, long[0] - short[0]) for long, short in zip(*runs[2 * index:2 * index + 2])]
             for index, (_, count) in enumerate(plan)]
    name, shown = f"1000 deltas/s: openai, {transport}", "%.1f"
    yield (bench_row(name, shown, *rates, "*", 10) if setup.openai else
           (name, shown % statistics.median(rates[0]), "-", "-", ">= 10", "-", "not installed"))
    peaks = [[peak for _, peak in each] for each in runs[:2]]
    yield bench_row(f"peak RSS, MiB: its short run, {transport}", "%.1f", *peaks, "-", 12)


def start_rows(setup, transport):
    """Start-up, and a whole short run against plain requests."""
    short = [bench_command(setup, who, f"short-10-{transport}") for who in ("mm", "requests")]
    for line in short:
        bench_check(setup, line, 10)
    launcher = f"import os, sys; sys.path[0] = {os.path.dirname(setup.mm)!r}; import mm; os._exit(mm.main())"  # as in the README
    lines = [[sys.executable, setup.mm, "--version"], [sys.executable, "-c", "import argparse, json"], *short,
             [sys.executable, "-c", launcher, "--version"], [sys.executable, "-c", launcher, *short[0][2:]]]
    runs = in_turn(4 * setup.rounds, lambda line: bench_cost(setup, line)[0] * 1000, lines)
    yield bench_row("--version, ms: import argparse, json", "%.0f", *runs[:2], "/", 2.2)
    yield bench_row("the same by the launcher", "%.0f", runs[4], runs[1], "/", 2.2)
    yield bench_row(f"one short answer, ms: requests, {transport}", "%.0f", *runs[2:4], "/", 1.35)
    yield bench_row("the same by the launcher", "%.0f", runs[5], runs[3], "/", 1.35)


def cache_rows(setup, transport):
    """What a real llama-server reads of a second question's prompt, which holds the first one and tools: against no cache."""
    def cost(options):
        text = f"{time.monotonic_ns()} Here are some words: " + " ".join(f"word{number}" for number in range(200))
        line = [sys.executable, setup.mm, "--url", setup.llama, "-p", "llamacpp", "-t", "all", "-o", "max_tokens=8", *options, "-i", "--json", "--no-save"]
        told = subprocess.run(line, input=f"{text}\nand now?\n", env=setup.environ, capture_output=True, text=True, timeout=LIMIT).stdout
        done = [event for event in map(json.loads, told.splitlines()) if event["type"] == "done"]
        if len(done) != 2 or not done[1]["timings"]:
            raise ValueError(f"no two answers with timings: {told[-200:]!a}")
        return done[1]["timings"]["prompt_n"], done[1]["timings"]["prompt_ms"]
    if not setup.llama:
        yield "a second question's prompt: without cache, llama-server", *"-----", "no LLAMA_URL"
        return
    ours, theirs = in_turn(setup.rounds, cost, [[], ["-o", "cache_prompt=false"]])
    for what, mine, base in zip(("tokens", "ms"), zip(*ours), zip(*theirs)):
        yield bench_row(f"a second question's prompt, {what}: without cache, llama-server", "%.0f", mine, base, "/", 0.2)


def all_rows(setup):
    """Every row of the table; what could not be measured has one that says why."""
    yield "measure: baseline", "mm", "baseline", "mm to baseline", "wanted", "noise", "verdict"
    for rows, transport in ((start_rows, "chunked"), (delay_rows, "chunked"), (delay_rows, "plain"),
                            (burst_rows, "chunked"), (burst_rows, "plain"), (cache_rows, "chunked")):
        try:
            yield from rows(setup, transport)
        except subprocess.TimeoutExpired:
            yield f"{rows.__name__}, {transport}", *"-----", f"failed: took more than {LIMIT} s"
        except (OSError, ValueError) as error:
            yield f"{rows.__name__}, {transport}", *"-----", f"failed: {error}"


def print_table(rows):
    """Rows, of which the first is the head, as a Markdown table that can be read as it is."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for cells in (rows[0], ["-" * width for width in widths], *rows[1:]):
        print("| " + " | ".join(map(str.ljust, cells, widths)) + " |")


def bench():
    parser = argparse.ArgumentParser(description="Measures mm against curl -N, plain requests and the openai client.")
    parser.add_argument("--mm", default=os.path.join(HERE, "mm.py"), help="path of mm.py")
    parser.add_argument("--openai-python", default="", help="the python of a venv that has openai")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement (default: 5)")
    args = parser.parse_args()
    with ThreadingHTTPServer(("127.0.0.1", 0), BenchHandler) as server:
        parent = os.getpid()  # the server's process must not outlive it
        server.service_actions = lambda: os.getppid() == parent or os._exit(0)
        process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
        process.start()
    try:
        with tempfile.TemporaryDirectory() as home:  # no settings, proxies or netrc of the person who runs this
            environ = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "LANG": "C.UTF-8", "NO_PROXY": "*",
                       "MM_API_KEY": os.environ.get("LLAMA_KEY", "")}
            openai = shutil.which(args.openai_python) or ""
            if openai and subprocess.run([openai, "-c", "import openai"], stderr=subprocess.DEVNULL).returncode:
                openai = ""
            url, llama = "http://127.0.0.1:%d/v1" % server.server_address[1], (os.environ.get("LLAMA_URL", "").split() or [""])[0]
            print_table(list(all_rows(Setup(url, os.path.abspath(args.mm), openai, environ, max(1, args.rounds), llama))))
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    bench()
