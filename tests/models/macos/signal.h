/* As string.h here. */
#pragma once
typedef unsigned sigset_t;
enum { SIG_BLOCK = 1, SIG_UNBLOCK, SIG_SETMASK };
int sigfillset(sigset_t *);
int pthread_sigmask(int, const sigset_t *, sigset_t *);
