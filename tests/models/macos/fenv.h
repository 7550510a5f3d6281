/* As string.h here. */
#pragma once
typedef struct {
    unsigned short control, status;
    unsigned mxcsr;
    char reserved[8];
} fenv_t;
extern const fenv_t _FE_DFL_ENV;
#define FE_DFL_ENV (&_FE_DFL_ENV)
int fegetenv(fenv_t *);
int fesetenv(const fenv_t *);
