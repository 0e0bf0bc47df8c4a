# make demo    a scripted answer, in a .venv made here        make live   checks against a real server (LLAMA_URL=...)
# make test    installs and runs the tests                    make bench  ratios against curl, requests and the openai client
PYTHON ?= python3
PIP = -m pip install --quiet --disable-pip-version-check

demo: .venv/requests
	.venv/bin/python mm.py --demo "What will I see when a model thinks?"

test: .venv/tests
	.venv/bin/python -m pytest -q -m "not live and not matrix and not fuzz and not endurance" test_mm.py

live: .venv/tests
	.venv/bin/python -m pytest -q -rs -m live test_mm.py

bench: .venv/tests .venv-bench/openai
	.venv/bin/python test_mm.py --openai-python .venv-bench/bin/python

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
	rm -rf .venv .venv-bench .pytest_cache __pycache__

.PHONY: demo test live bench clean
