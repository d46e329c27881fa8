# Sluice. `make demo` and `make test` set up what they lack (host-tools/setup/packages.sh names it first); warm, that
# costs a second. The rest is cargo's.
SHELL := /bin/bash
CARGO ?= cargo
TOOLS := target/release

.PHONY: help demo run test guest-selftest build setup-build setup-demo setup-test check clean

help:
	@echo 'make demo   set up, build, and show it: service up, real data offloaded, host compared, service down'
	@echo 'make run    set up, build, and serve in the foreground with configs/dev.toml'
	@echo 'make test   set up, and run every test'
	@echo 'make check  what .ci/run checks beside the tests: format, lints, docs, features'
	@echo 'make guest-selftest   the guest harness against the kernel'"'"'s own target'

setup-build:
	@host-tools/setup/packages.sh build

setup-demo:
	@host-tools/setup/packages.sh build demo

setup-test:
	@host-tools/setup/packages.sh build demo test
	@host-tools/guest/kernels.sh 6.1 6.12

build: setup-build
	@$(CARGO) build --release --workspace --bins

demo: setup-demo build
	@host-tools/demo/demo.sh

run: build
	@exec $(TOOLS)/offload-svc --config configs/dev.toml

test: setup-test
	@.ci/test

guest-selftest: setup-test
	@$(CARGO) test --release --workspace --test system -- selftest

check: setup-build
	@.ci/check

clean:
	@$(CARGO) clean
