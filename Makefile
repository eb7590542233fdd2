# make demo      bring up a small cluster, ask it something, show where the time went (ONESHOT=1: and end)
# make test      everything that CI checks
# make lint      format, lint, types and imports without the tests
# make docs      make the documentation's site, in build/docs
# make format    rewrite the sources in the project's format
# make clean     remove caches and build results (.venv stays)

BIN := .venv/bin

.PHONY: demo test lint docs format clean bootstrap

demo: bootstrap
	@$(BIN)/kvferry demo $(if $(filter-out 0,$(ONESHOT)),--oneshot)

test: bootstrap
	@scripts/checks.sh

lint: bootstrap
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: bootstrap
	@$(BIN)/sphinx-build -W -q docs build/docs && echo build/docs/index.html

format: bootstrap
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name .venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

bootstrap:
	@scripts/bootstrap.sh
