# install.mk: `make install PREFIX=/usr/local` and `make uninstall`. Included by the Makefile.
#
# DESTDIR stages the tree for a package; LIBDIR is relative to PREFIX (lib, lib64, lib/x86_64-linux-gnu).

LIBDIR ?= lib
INSTALL_ROOT := $(DESTDIR)$(PREFIX)
HEADERS := $(wildcard include/*.h)
INSTALL_CMAKE := $(INSTALL_ROOT)/$(LIBDIR)/cmake/esmm
MAN_PAGES := $(wildcard cli/man/*.1)
PRIVATE_LIBS := -lm -lpthread -ldl
FILL_IN = sed -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@VERSION@|$(VERSION)|g' \
  -e 's|@SOVERSION@|$(SOVERSION)|g' -e 's|@PRIVATE@|$(PRIVATE_LIBS)|g' \
  -e 's|@UP@|../../$(shell echo $(LIBDIR) | sed 's|[^/][^/]*|..|g')|g'

install: $(BUILD)/libesmm.a $(BUILD)/libesmm.so $(BUILD)/esmm
	@case '$(PREFIX)' in /*) ;; *) echo "PREFIX is '$(PREFIX)': it must start with /" >&2; exit 1;; esac
	@install -d $(INSTALL_ROOT)/include $(INSTALL_ROOT)/bin $(INSTALL_ROOT)/$(LIBDIR)/pkgconfig $(INSTALL_CMAKE)
	@install -m 644 $(HEADERS) $(INSTALL_ROOT)/include/
	@install -m 755 $(BUILD)/esmm $(INSTALL_ROOT)/bin/esmm
	@install -m 644 $(BUILD)/libesmm.a $(INSTALL_ROOT)/$(LIBDIR)/libesmm.a
	@install -m 755 $(BUILD)/libesmm.so.$(VERSION) $(INSTALL_ROOT)/$(LIBDIR)/libesmm.so.$(VERSION)
	@ln -sf libesmm.so.$(VERSION) $(INSTALL_ROOT)/$(LIBDIR)/libesmm.so.$(SOVERSION)
	@ln -sf libesmm.so.$(SOVERSION) $(INSTALL_ROOT)/$(LIBDIR)/libesmm.so
	@$(FILL_IN) esmm.pc.in > $(INSTALL_ROOT)/$(LIBDIR)/pkgconfig/esmm.pc
	@$(FILL_IN) cmake/esmmConfig.cmake.in > $(INSTALL_CMAKE)/esmmConfig.cmake
	@$(FILL_IN) cmake/esmmConfigVersion.cmake.in > $(INSTALL_CMAKE)/esmmConfigVersion.cmake
	@for page in $(MAN_PAGES); do \
	  install -d $(INSTALL_ROOT)/share/man/man1 && install -m 644 $$page $(INSTALL_ROOT)/share/man/man1/; done
	@echo "  installed in $(INSTALL_ROOT)"
	@[ -n '$(DESTDIR)' ] || sh scripts/installed.sh '$(PREFIX)' '$(LIBDIR)'

uninstall:
	@rm -f $(addprefix $(INSTALL_ROOT)/,$(HEADERS)) $(INSTALL_ROOT)/bin/esmm $(INSTALL_ROOT)/$(LIBDIR)/libesmm.a \
	  $(INSTALL_ROOT)/$(LIBDIR)/libesmm.so $(INSTALL_ROOT)/$(LIBDIR)/libesmm.so.$(SOVERSION) \
	  $(INSTALL_ROOT)/$(LIBDIR)/libesmm.so.$(VERSION) $(INSTALL_ROOT)/$(LIBDIR)/pkgconfig/esmm.pc \
	  $(INSTALL_CMAKE)/esmmConfig.cmake $(INSTALL_CMAKE)/esmmConfigVersion.cmake \
	  $(addprefix $(INSTALL_ROOT)/share/man/man1/,$(notdir $(MAN_PAGES)))
	@rmdir $(INSTALL_CMAKE) 2>/dev/null || true
	@echo "  removed from $(INSTALL_ROOT)"
