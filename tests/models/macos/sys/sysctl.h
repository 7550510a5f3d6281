/* As string.h here. */
#pragma once
#include <stddef.h>
int sysctlbyname(const char *, void *, size_t *, void *, size_t);
