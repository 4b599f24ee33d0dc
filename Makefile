# Short names for what scripts/ does. `make` lists them.

.DEFAULT_GOAL := help
.PHONY: help setup test changed slow lint types docs site wheel up clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: ## make .venv with all that tests need
	sh scripts/setup.sh test

test: ## every check that a change must pass, in under 15 minutes
	sh scripts/test.sh

changed: ## only the tests that are near the uncommitted change
	sh scripts/test.sh --changed

slow: ## all tests, the slow ones included
	sh scripts/test.sh --all

lint: setup ## ruff, with its fixes
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .

types: setup ## mypy --strict
	.venv/bin/python -m mypy

docs: setup ## write the pages that are made from the code
	.venv/bin/python tests/unit/test_metrics_page.py --fix
	.venv/bin/python tests/unit/test_flags.py --fix
	.venv/bin/python tests/unit/test_requirements.py --fix

site: ## build the documentation's site into site/, strictly
	sh scripts/docs.sh

wheel: ## build wheel and sdist into dist/ and try both in clean environments
	sh scripts/release.sh

up: setup ## a cluster of the shipped model at port 9000
	.venv/bin/pd-cluster up

clean: ## remove what the targets made, but .venv
	rm -rf dist site .pytest_cache .mypy_cache .ruff_cache
