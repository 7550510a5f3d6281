/* As string.h here. */
#pragma once
#include <stddef.h>
void *aligned_alloc(size_t, size_t);
void free(void *);
void abort(void) __attribute__((noreturn));
