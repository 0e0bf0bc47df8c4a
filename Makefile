# make demo    a scripted answer, in a .venv made here        make live    checks against a real server (LLAMA_URL=...)
# make test    installs and runs the tests                    make bench   ratios against curl, requests and the openai client
# make mm.pyz  one file with all that mm needs inside         make proof   all that takes longer: matrix, fuzz, endurance, mm.pyz
# make compat  the tests on every Python, with the oldest and the newest requests
PYTHON ?= python3
PIP = -m pip install --quiet --disable-pip-version-check
FAST = not live and not matrix and not fuzz and not endurance and not pyz

demo: .venv/requests
	.venv/bin/python mm.py --demo "What will I see when a model thinks?"

test: .venv/tests
	.venv/bin/python -m pytest -q -m "$(FAST)" test_mm.py

live: .venv/tests
	.venv/bin/python -m pytest -q -rs -m live test_mm.py

fuzz matrix endurance pyz: .venv/tests
	.venv/bin/python -m pytest -q -m $@ test_mm.py

proof: fuzz matrix endurance pyz

bench: .venv/tests .venv-bench/openai
	.venv/bin/python test_mm.py --openai-python .venv-bench/bin/python

# requests 2.25 and urllib3 1.26 are what old distributions ship; the first urllib3 that Python 3.12 can import is 1.26.17
compat:
	@for v in 3.9 3.10 3.11 3.12 3.13; do \
	  python=$$(ls -d $$HOME/.pyenv/versions/$$v.*/bin/python 2>/dev/null | tail -1); \
	  python=$${python:-$$(command -v python$$v)}; [ -n "$$python" ] || { echo "Python $$v: not found"; continue; }; \
	  for set in "requests==2.25.0 urllib3==1.26.20" "requests urllib3"; do \
	    venv=.venv-compat/$$v-$$(echo "$$set" | cut -d' ' -f1); \
	    [ -d $$venv ] || { "$$python" -m venv $$venv && $$venv/bin/python $(PIP) $$set pytest responses; } || exit 1; \
	    echo "Python $$v, $$set: $$($$venv/bin/python -m pytest -q -m '$(FAST)' test_mm.py 2>&1 | grep -E '^FAILED|^ERROR| passed| failed' | cut -c1-200)"; \
	  done; \
	done

# One file: mm, requests and PyYAML (its Python part), nothing compiled, so that any Python runs it. The same bytes each time.
PINNED = requests==2.32.5 urllib3==2.5.0 idna==3.10 certifi==2026.10.19.post1 charset-normalizer==3.4.4 PyYAML==6.0.3
define PACK
import os, zipfile
names = sorted(os.path.join(folder, name) for folder, _, files in os.walk(".pyz") for name in files)
with open("mm.pyz", "wb") as file:
    file.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(os.path.relpath(name, ".pyz"), (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            with open(name, "rb") as content:
                archive.writestr(entry, content.read())
os.chmod("mm.pyz", 0o755)
endef
define MAIN
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # until mm can end in one line
import sys
try:
    import certifi
    certifi.where()  # writes its file beside the archive's, so to say: into a temporary folder
except OSError:  # nothing can be written: the system's certificates, if there are any
    import ssl
    certifi.where = lambda: ssl.get_default_verify_paths().cafile or ""
import mm
sys.exit(mm.main())  # not os._exit: certifi has put its file beside the archive, and takes it away again
endef
export PACK MAIN

mm.pyz: mm.py Makefile
	rm -rf .pyz .venv-pyz
	$(PYTHON) -m venv .venv-pyz
	.venv-pyz/bin/python $(PIP) --target .pyz --python-version 3.9 --only-binary=:all: --no-deps --no-compile $(PINNED)
	find .pyz -name '*.so' -delete
	rm -rf .pyz/*.dist-info .pyz/bin .pyz/_yaml
	cp mm.py .pyz/
	printf '%s\n' "$$MAIN" > .pyz/__main__.py
	$(PYTHON) -c "$$PACK"
	rm -rf .pyz .venv-pyz

.venv/requests:
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) requests
	@touch $@

.venv/tests: .venv/requests
	.venv/bin/python $(PIP) pytest responses
	@touch $@

.venv-bench/openai:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(PIP) openai
	@touch $@

clean:
	rm -rf .venv .venv-bench .venv-compat .venv-pyz .pyz mm.pyz .pytest_cache __pycache__

.PHONY: demo test live fuzz matrix endurance pyz proof bench compat clean
