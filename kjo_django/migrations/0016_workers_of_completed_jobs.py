from django.db import migrations, models

from kjo_django.migrations._operations import AddColumn


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0015_dashboard_without_rows")]

    operations = [
        AddColumn(
            model_name="job",
            name="worker",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The worker that completed it, kept where the job asks for it, as Django Tasks do.",
                max_length=255,
                verbose_name="worker",
            ),
        ),
    ]
