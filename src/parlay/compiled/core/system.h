/* What the pool of threads asks of the operating system: to sleep on a word, and how long threads waited for cores.
 *
 * Linux answers both. Elsewhere one lock and one condition of POSIX threads stand for all words, and nobody tells how
 * long a thread waited. PARLAY_POSIX asks for that form on Linux too, where it can be tested.
 */
#ifndef PARLAY_SYSTEM_H
#define PARLAY_SYSTEM_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#if defined(__linux__) && !defined(PARLAY_POSIX)
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Sleeps while the word is what was seen; for so many nanoseconds at most, if not 0. May wake for no reason. */
static void sleep_on(uint32_t *word, uint32_t seen, int64_t nanoseconds)
{
    struct timespec most = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nanoseconds ? &most : 0, 0, 0);
}

/* Wakes all who sleep on a word that has changed. */
static void wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

static void forget_sleepers(void) {}

static int64_t thread_name(void)
{
    return syscall(SYS_gettid);
}

/* How long a thread has been ready to run without a core, since it began. 0 where the system does not tell. */
static int64_t waited_for_core(int64_t thread)
{
    char path[64], text[128];
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", (int)thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    text[size > 0 ? size : 0] = 0;
    long long ran, waited;
    return sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : 0;
}

#else

static pthread_mutex_t sleepers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleepers_bell = PTHREAD_COND_INITIALIZER;

static void sleep_on(uint32_t *word, uint32_t seen, int64_t nanoseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t end = until.tv_nsec + nanoseconds;
    until.tv_sec += end / 1000000000, until.tv_nsec = end % 1000000000;
    pthread_mutex_lock(&sleepers_lock);
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == seen) {
        if (nanoseconds)
            pthread_cond_timedwait(&sleepers_bell, &sleepers_lock, &until);
        else
            pthread_cond_wait(&sleepers_bell, &sleepers_lock);
    }
    pthread_mutex_unlock(&sleepers_lock);
}

static void wake(uint32_t *word)
{
    (void)word;
    pthread_mutex_lock(&sleepers_lock); /* a thread that saw the old word sleeps by now */
    pthread_cond_broadcast(&sleepers_bell);
    pthread_mutex_unlock(&sleepers_lock);
}

/* In the child of a fork, which has none of the sleepers, and maybe a lock that nobody holds any more. */
static void forget_sleepers(void)
{
    pthread_mutex_init(&sleepers_lock, 0);
    pthread_cond_init(&sleepers_bell, 0);
}

static int64_t thread_name(void)
{
    return 0;
}

static int64_t waited_for_core(int64_t thread)
{
    (void)thread;
    return 0;
}

#endif

#endif
