from reports.tasks import close_report, mail_report, refresh_rates


def close(report, notify=True):
    close_report.delay(report.pk)
    if notify:
        mail_report.delay(report.pk, to="boss@example.com")


def refresh(currencies):
    return [refresh_rates.delay(currency).id for currency in currencies]
